"""Other settings of a run that compute the same, and which of them are worth a choice between time and memory.

A setting is model.remat, microbatches and mesh.fsdp. Along each of them, a value that needs more memory usually takes
less time. So a setting that doesn't fit rules out all that need no less along any of them.
"""

import itertools
import math
import shlex
from typing import NamedTuple

from ml_collections import ConfigDict

from diffeqformer.config import check_config, get_field, given_fields, unused_fields
from diffeqformer.errors import UserError
from diffeqformer.parallel.mesh import mesh_shape

VARIED = ("model.remat", "microbatches", "mesh.fsdp")
REMAT_BY_MEMORY = ("reversible", "binomial", "step", "products", "none")  # from the least memory to the most
ALWAYS_TRIED = REMAT_BY_MEMORY[2:]  # the others with a config that has them


class Setting(NamedTuple):
    """Values of `VARIED`."""

    remat: str
    microbatches: int
    fsdp: int

    def place(self) -> tuple[float, float, float]:
        """Where it lies: a step towards more memory is the next kind of `remat`, or half the microbatches or fsdp."""
        return float(REMAT_BY_MEMORY.index(self.remat)), -math.log2(self.microbatches), -math.log2(self.fsdp)

    def steps_from(self, other: "Setting") -> tuple[float, float]:
        """The steps from another setting to this one: those that need more memory, and those that save it."""
        steps = [ours - theirs for ours, theirs in zip(self.place(), other.place())]
        return sum(max(step, 0.0) for step in steps), sum(max(-step, 0.0) for step in steps)

    def needs_no_less(self, other: "Setting") -> bool:
        """Whether no field promises to save memory."""
        return all(ours >= theirs for ours, theirs in zip(self.place(), other.place()))


class Tried(NamedTuple):
    """A setting and its plan (`estimate.plan_of`)."""

    setting: Setting
    plan: dict

    @property
    def needed(self) -> int:
        """Bytes on a device."""
        return self.plan["memory"]["capacity"] - self.plan["memory"]["to_spare"]

    @property
    def hours(self) -> float:
        """To the last step, with attention and collectives; infinite if it doesn't compile."""
        return self.plan["training"]["with_account"]["hours"] if "training" in self.plan else math.inf

    def better_than(self, other: "Tried") -> bool:
        """Whether it is no worse in time and memory, and better in one of them."""
        ours, theirs = (self.hours, self.needed), (other.hours, other.needed)
        return ours != theirs and all(mine <= its for mine, its in zip(ours, theirs))


def own_setting(config: ConfigDict, num_devices: int) -> Setting:
    """The setting of a config."""
    return Setting(config.model.remat, config.microbatches, mesh_shape(config.mesh, num_devices)[1])


def with_setting(config: ConfigDict, setting: Setting) -> ConfigDict:
    """A config with a setting."""
    config = config.copy_and_resolve_references()
    config.model.remat, config.microbatches, config.mesh.fsdp = setting
    return config


def settings_of(config: ConfigDict, num_devices: int) -> list[Setting]:
    """All settings that `check_config` accepts on TPUs."""
    divisors = [size for size in range(1, num_devices + 1) if num_devices % size == 0]
    remats = [remat for remat in REMAT_BY_MEMORY if remat in (*ALWAYS_TRIED, config.model.remat)]
    parts = [size for size in range(1, config.batch_size + 1) if config.batch_size % size == 0]
    return [
        setting
        for setting in map(Setting._make, itertools.product(remats, parts, divisors))
        if _accepted(with_setting(config, setting), num_devices)
    ]


def _accepted(config: ConfigDict, num_devices: int) -> bool:
    try:
        check_config(config, num_devices, "tpu")
    except UserError:
        return False
    return True


def next_setting(own: Setting, settings: list[Setting], tried: list[Tried]) -> Setting | None:
    """The setting to try next; None: nothing is left that could fit.

    The own one comes first. As long as none fits, those follow that save memory, two steps at once. Then they are taken
    from around the fastest that fits: first those that use more memory, or use here what they save there.
    """
    known, fitting = {found.setting for found in tried}, [found for found in tried if found.plan["fits"]]
    too_large = [found.setting for found in tried if not found.plan["fits"]]
    left = [
        setting
        for setting in settings
        if setting not in known and not any(setting.needs_no_less(other) for other in too_large)
    ]
    if not tried or not left:
        return own if not tried else None
    if fitting:
        fastest = min(fitting, key=lambda found: found.hours).setting
        return min(left, key=lambda one: _order_around(one, fastest))
    smallest = min(tried, key=lambda found: found.needed).setting
    return min(left, key=lambda one: _order_below(one, smallest))


def _order_around(one: Setting, fastest: Setting) -> tuple:
    more, less = one.steps_from(fastest)
    return max(more, less) + (not more), more + less, -REMAT_BY_MEMORY.index(one.remat), one.place()


def _order_below(one: Setting, smallest: Setting) -> tuple:
    more, less = one.steps_from(smallest)
    return 3 * more + abs(less - 2), one.place()


def front(tried: list[Tried]) -> list[Tried]:
    """Those that no other one beats, the fastest first. What has no time isn't among them, unless nothing has one."""
    timed = [found for found in tried if found.hours < math.inf] or tried
    best = [found for found in timed if not any(other.better_than(found) for other in timed)]
    return sorted(best, key=lambda found: found.hours)


def command_of(arguments: list[str], config: ConfigDict, setting: Setting) -> str:
    """The command that trains with a setting.

    Args:
        arguments: those of the command that plans.
        config: the config that they define. What has its value already isn't written again.
    """
    changed = {name: value for name, value in zip(VARIED, setting) if value != get_field(config, name)}
    left_out, kept = {*changed, *unused_fields(with_setting(config, setting), given_fields(arguments))}, []
    for argument, following in zip(arguments, [*arguments[1:], "--"]):
        name, equals, _ = argument.lstrip("-").partition("=")
        option, _, field = name.partition(".")
        if argument.startswith("-") and option.removeprefix("no") == "config" and field not in left_out:
            alone = equals or option == "noconfig" or following.startswith("--")
            kept += [argument] if alone else [argument, following]
    kept += [f"--config.{name}={value}" for name, value in changed.items()]
    return shlex.join(["python", "-m", "diffeqformer.main", *kept])
