"""The experiments' scripts, with trainings that leave made-up curves, and what they share."""

import json
import math
import runpy
import sys

import numpy as np
import pytest
from absl import flags

from diffeqformer.config import check_config, check_overrides, check_used, get_field


class Trainings:
    """What stands in for trainings: they check their options as `main` does, and have the curves of a function.

    `configs` has the config of each by the name of its folder, `curves` is (config) -> {tag: {step: value}}.
    """

    def __init__(self, curves):
        self.configs, self.curves = {}, curves

    def train(self, workdir, options, cores=None):
        assert workdir.name not in self.configs, "it was trained twice"
        check_overrides(options)
        path, _, model = options[0].removeprefix("--config=").partition(":")
        config = runpy.run_path(path)["get_config"](*[model] * bool(model))
        for name, text in (option.removeprefix("--config.").split("=", 1) for option in options[1:]):
            kind = type(get_field(config, name))
            value = flags.BooleanParser().parse(text) if kind is bool else kind(text)
            config.update_from_flattened_dict({name: value})
        check_used(options, config)
        check_config(config, num_devices=None)
        self.configs[workdir.name] = config

    def stand_ins(self, **others):
        """Functions for the fixture `script`."""
        own = {"train": self.train, "read_curves": lambda workdir: self.curves(self.configs[workdir.name])}
        return own | {"number_of_parameters": lambda workdir: 1234} | others

    def new(self) -> dict:
        """The configs since the last call."""
        configs, self.configs = self.configs, {}
        return configs


def validation(config, best: float, plus: float = 0.0) -> dict[str, dict[int, float]]:
    """Curves that end at 2 + `plus` at the best rate, and higher at others."""
    values = {1: 9.0, 2: 2 + plus + abs(math.log2(config.optimizer.learning_rate / best))}
    return {"validation/perplexity": values, "validation/bits_per_byte": values}


def rates(configs) -> list[float]:
    """Their learning rates, sorted."""
    return sorted(config.optimizer.learning_rate for config in configs)


def test_a_study_tunes_each_form_and_runs_nothing_twice(tmp_path, script, capsys):
    best = {"diffeqformer": 2e-3, "alternative": 1.6e-2}
    trainings = Trainings(lambda config: validation(config, best[config.model.kind], 0.1 * config.seed))
    results = tmp_path / "results.json"

    def trained(*options):
        options = ("--study=design", f"--folder={tmp_path}", f"--results={results}", "--seeds=2", *options)
        script("ablations", *options, **trainings.stand_ins()).main(None)
        return list(trainings.new().values())

    first = trained()
    tuned, shown = ([config for config in first if (config.seed > 0) == later] for later in (False, True))
    assert rates(config for config in tuned if config.model.kind == "diffeqformer") == [1e-3, 2e-3, 4e-3, 8e-3]
    assert rates(config for config in tuned if config.model.kind == "alternative") == [2e-3, 4e-3, 8e-3, 1.6e-2]
    assert [(config.model.kind, config.seed) for config in shown] == [(kind, seed) for seed in (1, 2) for kind in best]
    assert all(config.optimizer.learning_rate == best[config.model.kind] for config in shown)
    assert "| alternative | 1,234 | 1.6e-2 | 2.150 ± 0.071 | 2, 2 | 2.150 ± 0.071 | +0.000 ± 0.000 |" in (
        capsys.readouterr().out
    )
    assert (tmp_path / "tiny-design.png").stat().st_size > 10_000
    found = json.loads(results.read_text())
    run = found.pop("tiny-alternative-1.6e-2-seed_2-1500_steps-own_text")
    assert run == {"perplexity": {"1": 9.0, "2": 2.2}, "parameters": 1234} and len(found) == 11
    assert trained() == []
    results.write_text(json.dumps(found))
    [again] = trained()
    assert (again.model.kind, again.seed, again.steps) == ("alternative", 2, 1500)
    assert len(trained("--steps=1000")) == 12


def test_saved_ablations_are_complete(tmp_path, script, capsys):
    trainings, forms = Trainings(None), {}
    for study in ("perplexity", "llama", "embedding", "design", "beta2", "shared"):
        script("ablations", f"--study={study}", f"--folder={tmp_path}", **trainings.stand_ins()).main(None)
        forms[study] = [line[2:].split(" | ")[0] for line in capsys.readouterr().out.splitlines()[2:-1]]
        assert (tmp_path / f"tiny-{study}.png").stat().st_size > 10_000
    assert not trainings.new() and list(map(len, forms.values())) == [3, 2, 6, 2, 4, 2]
    wider = [f"diffeqformer, time_embed_dim {width}" for width in (4, 12, 48, 96)]
    assert forms["embedding"] == [*wider[:2], "diffeqformer", *wider[2:], "gpt"]  # tiny.py's own width is 24


def test_processes_that_share_a_file_of_results_lose_none(script, tmp_path):
    script("training_times", f"--results={tmp_path / 'new' / 'results.json'}", "--at_once=1")
    shared, begun = sys.modules["common"], []
    path = shared.results_file()

    def work(row, cores):
        begun.append(row)
        if row == "a":  # while another process works on the others
            shared.add_results(path, {"b": {"by": "another"}, "d": {"by": "another"}})
        return {"by": "this"}

    found = shared.run_rows(["a", "b", "c"], str, work)
    assert begun == ["a", "c"] and found == json.loads(path.read_text())
    assert {row: found[row]["by"] for row in "abcd"} == dict(a="this", b="another", c="this", d="another")


def test_a_simulated_particle_grows_as_the_differential_equation_says(script):
    """Alone, it attends only to itself: dx/dt = s(t) V x, so its growth follows from the integral of s."""
    simulate = script("simulation").simulate
    for degree, equal_total, integral in ((0, False, 2.0), (2, False, 2 / 3), (2, True, 2.0)):
        [path] = simulate(degree, equal_total=equal_total, particles=1, dimensions=1, steps=4000, horizon=2.0)
        random = np.random.RandomState(0)
        start, value = random.uniform(-1, 1), random.randn(3)[2]
        assert path.shape == (4001, 1, 1) and path[0, 0, 0] == start
        assert path[-1, 0, 0] / start == pytest.approx(np.exp(integral * value), rel=1e-2)


def test_growing_weights_gather_particles_as_constant_ones_do_if_their_totals_are_equal(script, tmp_path, monkeypatch):
    """By the lower quartile of the last distances, relative to the root mean square."""
    simulation = script("simulation", f"--output={tmp_path}", "--draws=20")
    monkeypatch.setattr(simulation, "SHOWN_EVERY", 200)
    simulation.main(None)
    assert all((tmp_path / f"{name}.png").stat().st_size > 10_000 for name in simulation.KINDS)
    lines = (tmp_path / "table.md").read_text().splitlines()[2:]
    ends, totals = ([float(cell.split()[0]) for cell in line.strip("| ").split(" | ")[1:]] for line in lines)
    assert ends[3] > 1.3 * ends[0] and totals[3] == pytest.approx(totals[0], rel=0.12) and totals[0] == ends[0]
