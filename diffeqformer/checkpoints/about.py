"""What a checkpoint says of itself."""

import dataclasses
import typing

from diffeqformer.data.seals import sealed, unsealed


@dataclasses.dataclass(frozen=True)
class About:
    """The metadata stored in a checkpoint. None: an earlier version saved it, or there is none."""

    config: dict
    tokenizer: str  # its name
    tokenizer_data: str = ""  # the result of `Tokenizer.save`; empty if the name is enough
    base: dict | None = None  # the origin of the initial weights: `workdir`, `step` and `data_sha256` of another run
    teacher: dict | None = None  # the same of the teacher's run, and `model`, a part of its config
    data_sha256: str = ""  # hash of the training split's ids
    validation_sha256: str = ""  # of the validation split's, or empty if an earlier version saved it
    store: str | None = None  # the folder of the token store, in full
    validation_due: bool = False  # whether the next process must validate this state first
    materialized_from: dict | None = None  # `workdir`, `step` and `model` (a config) of the source run or folder
    time_spent: dict | None = None  # where the run's time went until this state (`diffeqformer.training.goodput`)
    earlier_rates: dict | None = None  # higher peak rates that a run with the schedule `wsd` had, by their last steps
    checksums: dict | None = None  # of the saved arrays, by path (`checksums`)

    def to_json(self) -> dict:
        """The fields that have a value, sealed."""
        return sealed({name: value for name, value in vars(self).items() if value is not None})

    @classmethod
    def from_json(cls, saved: dict) -> "About":
        """The reverse. Fields that an earlier version didn't write get their defaults."""
        saved, types = unsealed(saved), typing.get_type_hints(cls)
        fields = {name: saved[name] for name in types if name in saved}
        for name in ("config", "tokenizer", *fields):
            if not isinstance(fields.get(name), types[name]):
                raise ValueError(f"'{name}' in its 'about' can't be of type {type(fields.get(name)).__name__}")
        for name in ("base", "teacher", "materialized_from"):
            origin = fields.get(name, {"workdir": "", "step": 0})
            if not (isinstance(origin.get("workdir"), str) and isinstance(origin.get("step"), int)):
                raise ValueError(f"'{name}' in its 'about' must have a workdir and a step, but it is {origin!r}")
        numbers = fields.get("time_spent", {}).values()
        if not all(isinstance(number, int | float) and 0 <= number < 1e15 for number in numbers):
            raise ValueError("'time_spent' in its 'about' must hold nothing but numbers of at least 0")
        return cls(**fields)
