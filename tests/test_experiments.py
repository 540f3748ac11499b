"""The experiments' scripts, with trainings that leave made-up curves."""

import json
import math
import runpy
import types
from base64 import b64encode

import pytest
from absl import flags

from diffeqformer.config import check_config, check_overrides, check_used, field_names, get_field
from helpers import ROOT


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


def test_a_recipe_is_compared_at_its_own_best_rate_with_its_baseline(tmp_path, script, capsys):
    trainings = Trainings(
        lambda config: validation(config, 8e-3, 0.1 * config.seed - 0.1 * (config.model.kind == "interpolated"))
    )

    def trained(forms):
        options = f"--folder={tmp_path}", f"--results={tmp_path / 'results.json'}", "--seeds=2", f"--forms={forms}"
        recipe = script("recipe", *options, **trainings.stand_ins())
        recipe.write_corpus = lambda folder: ["--config.data.task=wikitext103"]
        recipe.times_of = lambda form: {"step": 2.0, "token": 1.5}
        recipe.main(None)
        return list(trainings.new().values())

    forms = "llama, muon;llama's block, interpolated, muon"
    tuned, shown = [], []
    for config in trained(forms):
        (tuned if config.data.task == "wikitext103" else shown).append(config)
    assert rates(tuned) == sorted([2e-3, 4e-3, 8e-3, 1.6e-2] * 2) and {config.seed for config in tuned} == {0}
    assert rates(shown) == [8e-3] * 4 and [config.seed for config in shown] == [1, 1, 2, 2]
    shown = capsys.readouterr().out
    assert "| llama, muon | 1,234 | 8e-3 | 2.150 ± 0.071 | 2, 2 | 2.150 ± 0.071 |  |  |  |\n" in shown
    assert "| 2.050 ± 0.071 | 2, 2 | 2.050 ± 0.071 | -0.100 ± 0.000 | 2.0 | 1.5 |\n" in shown
    assert (tmp_path / "tiny-recipe.png").stat().st_size > 5_000 and trained(forms) == []


def test_saved_ablations_are_complete(tmp_path, script, capsys):
    trainings, forms = Trainings(None), {}
    for study in ("perplexity", "llama", "embedding", "design", "beta2", "shared"):
        script("ablations", f"--study={study}", f"--folder={tmp_path}", **trainings.stand_ins()).main(None)
        forms[study] = [line[2:].split(" | ")[0] for line in capsys.readouterr().out.splitlines()[2:-1]]
        assert (tmp_path / f"tiny-{study}.png").stat().st_size > 10_000
    assert not trainings.new() and list(map(len, forms.values())) == [3, 2, 6, 2, 4, 2]
    wider = [f"diffeqformer, time_embed_dim {width}" for width in (4, 12, 48, 96)]
    assert forms["embedding"] == [*wider[:2], "diffeqformer", *wider[2:], "gpt"]  # tiny.py's own width is 24


@pytest.mark.slow
def test_fine_tuning_at_other_depths_tunes_every_base_and_runs_nothing_twice(tmp_path, script):
    best = {"": 4e-3, "full": 2e-3, "lora": 8e-3}
    wikitext, folder = tmp_path / "wiki.valid.tokens", tmp_path / "runs"
    wikitext.write_text("".join(f" = Title {number} = \n\n Some words . \n\n" for number in range(8)))

    def mode(config):
        return ("lora" if config.model.lora_rank else "full") if config.base else ""

    def curves(config):
        """The best at 200 steps, worse with another depth than 8 or another rate; the seed is added."""
        worse = abs(math.log2(config.optimizer.learning_rate / best[mode(config)])) + 3 + config.seed
        worse += abs(config.model.num_steps - 8) if config.base else 0
        return {"validation/perplexity": {step: abs(step - 200) / 100 + worse for step in range(0, 401, 100)}}

    trainings = Trainings(curves)

    def trained(seeds):
        options = f"--wikitext={wikitext}", f"--folder={folder}", f"--results={tmp_path / 'results.json'}"
        script("finetune_depths", *options, f"--seeds={seeds}", **trainings.stand_ins()).main(None)
        assert (folder / "figure.png").stat().st_size > 10_000
        return trainings.new()

    first = trained(1)
    assert len(first) == 2 * (2 * (3 + 4 + 4) + (1 + 8) + (1 + 2))
    tuned = [config for config in first.values() if config.seed == 0]
    second = trained(2)  # the rates and the first seed's runs are from the results
    assert len(second) == len(first) - len(tuned) and all(config.seed == 2 for config in second.values())
    for name, config in second.items():
        assert config.optimizer.learning_rate == best[mode(config)] and config.optimizer.decay == "everything"
        assert not config.base or config.base.endswith("-2-rate-0.004")
        of_first = name.startswith("stdlib-") == (not config.base)  # its own text is the library
        assert (config.data.task == "wikitext") != of_first
    table = [line.strip("| ").split(" | ") for line in (folder / "table.md").read_text().splitlines()]
    cells = ["8.50 ± 0.71", "6.50 ± 0.71", "200, 200", "8.50 ± 0.71"]
    assert ["stdlib_to_wikitext", "diffeqformer", "lora", "6", "2", *cells] in table


def test_shrunken_configs_keep_what_is_published(tmp_path, script, capsys):
    def curves(config):
        rounded, steps = config.model.dtype == "bfloat16", range(10, config.steps + 1, 10)
        return {
            "train/loss": {step: 7 - step / 10 + 0.25 * (rounded and step == 10) for step in steps},
            "train/gradient_norm": {step: 10 / step for step in steps},
            "validation/loss": {config.steps: 3 + (0.5 + config.seed) * rounded},
        }

    trainings = Trainings(curves)

    def trained():
        options = "--steps=20", "--seeds=2", f"--folder={tmp_path}", f"--results={tmp_path / 'full_scale.json'}"
        full_scale = script("full_scale", *options, **trainings.stand_ins())
        full_scale.make_tokenizer = lambda: None
        full_scale.main(None)
        return trainings.new(), capsys.readouterr().out

    configs, printed = trained()
    assert [config.seed for config in configs.values()] == 4 * [0] + 4 * [1]
    for name, ours in configs.items():
        theirs = runpy.run_path(f"configs/{name.partition('-')[0]}.py")["get_config"]()
        changed = {field for field in field_names(ours) if get_field(ours, field) != get_field(theirs, field)}
        shape = {"width": 128, "heads": 4, "mlp": 512, "num_steps": 8, "max_length": 128, "vocab_size": 2000}
        assert {field: ours.model[field] for field in shape} == shape and ours.model.vocab_multiple == 128
        assert (ours.batch_size, ours.sequence_length) == (9, 128)
        left = changed - {f"model.{field}" for field in (*shape, "vocab_multiple", "dtype")} - {"seed"}
        left = {field for field in left if not field.startswith(("data.", "log_", "eval_", "checkpoint"))}
        assert left == {"steps", "batch_size", "sequence_length", "mesh.fsdp"}
    assert "| llama_1b | 2 | 1.0000 ± 0.7071 | 0.250 ± 0.000 | 0.75 ± 0.00 | 0 ± 0 |" in printed
    assert trained() == ({}, printed)
    assert (tmp_path / "full_scale.png").stat().st_size > 10_000


def test_every_picture_of_the_docs_is_drawn(tmp_path, script, monkeypatch, capsys):
    wikitext, pictures, of_a_study = (tmp_path / name for name in ("wiki.valid.tokens", "pictures", "of_a_study"))
    wikitext.write_text("".join(f" = Title {number} = \n\n Some words . \n\n" for number in range(60)))
    of_a_study.write_text("study")
    pictures.mkdir()

    def report(module, workdir, name, options):
        images = [(alt, f"{alt} {n}") for n in range(3) for alt in ("spectrum of QK", "simulated particles")]
        images = [(alt, b64encode(text.encode()).decode()) for alt, text in images]
        html = [f'<img alt="{alt}" src="data:image/png;base64,{image}">' for alt, image in images]
        (workdir / name).mkdir(parents=True, exist_ok=True)
        for file, text in (("report.html", "".join(html)), ("ode.png", "ode"), ("perplexity.png", "perplexity")):
            (workdir / name / file).write_text(text)

    def draw(*options):
        stand_ins = {"report": report, "train": lambda *_: None}
        figures = script("docs_figures", f"--folder={tmp_path / 'runs'}", *options, **stand_ins)
        studies = {name: study._replace(file=str(of_a_study)) for name, study in figures.OF_STUDIES.items()}
        figures.OF_STUDIES, figures.PICTURES = studies, pictures
        figures.subprocess = types.SimpleNamespace(run=lambda command: types.SimpleNamespace(returncode=0))
        figures.main(None)
        return capsys.readouterr().out, {path.stem: path.read_text() for path in pictures.iterdir()}

    said, drawn = draw()
    assert said.count("left as it is") == 3 and len(drawn) == 12
    _, drawn = draw(f"--wikitext={wikitext}")
    assert drawn.keys() == {path.stem for path in (ROOT / "docs" / "pictures").glob("*.png")}
    assert list(drawn.values()).count("study") == 10 and drawn["depth"] == "perplexity"
    assert (drawn["spectrum_qk"], drawn["clustering_equal_total"]) == ("spectrum of QK 0", "simulated particles 2")
