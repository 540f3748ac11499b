"""The search for a recipe: forms of the DiffEqFormer against a GPT and a Llama, each with its own tuned learning rate.

    python experiments/recipe.py --at_once=2     # configs/tiny.py on two CPU cores; some hours
    python experiments/recipe.py --at_once=2 --config=experiments/twelve_steps.py --rates=4e-3,8e-3,1.6e-2 \
        --forms="llama, muon;llama's block, interpolated, muon"
    python experiments/recipe.py --at_once=2 --config=experiments/larger.py --steps=4000 --rates=4e-3,8e-3,1.6e-2 \
        --forms="llama, muon;llama's block, interpolated, muon"    # two runs take an hour

tuning.py says how they are run. Rates are found on the text of python_packages.py, and the runs shown have the config's
own text, which the choice hasn't seen, unless that is the same text. The times of a train step and of a written token
are measured once, in alternating rounds with the baseline's, on the CPU.
"""

import collections
import pathlib
import statistics
import sys
import time

import jax
import numpy as np
from absl import app, flags
from common import add_results, define_flags, read_results, results_file
from python_packages import write_corpus
from tuning import OWN_TEXT, Comparison, Form, Study, time_key

FORMS = flags.DEFINE_string("forms", None, "The forms to run, with semicolons between them; by default all.")
define_flags("recipe")

MUON = {"optimizer.name": "muon"}
UNIT = {"model.solver": "lie_trotter", "model.generator_start": "unit"}
LLAMA = {"model.field": "llama"}
PLAIN = LLAMA | {"model.norm_of_norm": False}

FORM = {
    "gpt": Form("gpt"),
    "gpt's block, published": Form("diffeqformer", "gpt"),
    "gpt's block, unit": Form("diffeqformer", "gpt", UNIT),
    "gpt, muon": Form("gpt", changes=MUON),
    "llama": Form("llama"),
    "llama's block, published": Form("diffeqformer", "llama", LLAMA),
    "llama's block, unit": Form("diffeqformer", "llama", PLAIN | UNIT),
    "llama, muon": Form("llama", changes=MUON),
    "llama's block, unit, muon": Form("diffeqformer", "llama, muon", PLAIN | UNIT | MUON),
    "llama's block, interpolated, muon": Form("recipe", "llama, muon"),
    "llama's block, elastic, muon": Form("recipe", "llama, muon", {"model.training_depths": "2:1,4:3"}),
}
"""What is compared. The published form starts as tiny.py does, with B at a transformer's scale. A GPT's layers as knots
are that GPT to the last bit, so they aren't a form."""


class Step:
    """The compiled train step of a form, for timing."""

    def __init__(self, form: str):
        from diffeqformer.training.run import make_program

        config = FORM[form].config()
        self.program = make_program(config)
        self.state = self.program.init()
        shape = config.batch_size, config.sequence_length
        self.tokens = np.random.RandomState(0).randint(config.model.vocab_size, size=shape)

    def seconds(self) -> float:
        """The time of one step."""
        start = time.perf_counter()
        self.state, _ = self.program.train_step(self.state, self.tokens)
        jax.block_until_ready(self.state)
        return time.perf_counter() - start


class Writing:
    """A model of a form that writes, for timing."""

    def __init__(self, form: str):
        from diffeqformer.transformer import new_model

        self.model = new_model(FORM[form].config())

    def seconds(self) -> float:
        """The time of 100 tokens after the first, which comes with the weights."""
        from diffeqformer.inference.sampling import Choice, write_tokens

        size, key = self.model.vocab_size, jax.random.key(0)
        tokens = write_tokens(self.model, [0] * 8, count=101, key=key, vocab_size=size, choice=Choice())
        next(tokens)
        start = time.perf_counter()
        collections.deque(tokens, maxlen=0)
        return time.perf_counter() - start


def ratio(kind: type[Step] | type[Writing], form: str) -> float:
    """The time of a form, divided by its baseline's: the median of 60 alternating pairs after a warm-up."""
    both = kind(form), kind(FORM[form].baseline)
    pairs = [[each.seconds() for each in both] for _ in range(65)][5:]
    return round(statistics.median(own / other for own, other in pairs), 3)


def times_of(form: str) -> dict[str, float]:
    """What a train step and a written token take, as parts of the baseline's."""
    return {"step": ratio(Step, form), "token": ratio(Writing, form)}


def plot(found: list[Comparison], path: pathlib.Path) -> None:
    """Plot the differences from the baselines: a line for each comparison, a point for each seed."""
    from diffeqformer.console.figures import COLOURS, new_figure

    found = [each for each in found if each.differences][::-1]
    figure, [[panel]] = new_figure(1, 1, (8, 1 + 0.35 * len(found)))
    for row, each in enumerate(found):
        colour = COLOURS[list(FORM).index(each.form.baseline) % len(COLOURS)]
        panel.plot(each.differences, [row] * len(each.differences), "o", color=colour, alpha=0.5)
        panel.plot(statistics.mean(each.differences), row, "|", color=colour, markersize=14, markeredgewidth=3)
    panel.axvline(0, color="black", linewidth=1)
    panel.set(yticks=range(len(found)), ylabel="form", xlabel="bits/byte above the baseline (less is better)")
    panel.set_yticklabels([each.name for each in found], fontsize=8)
    figure.savefig(path, dpi=110)


def main(_) -> None:
    jax.config.update("jax_platforms", "cpu")  # the runs need the accelerator
    wanted = FORMS.value.split(";") if FORMS.value else list(FORM)
    for form in wanted:
        if form not in FORM:
            sys.exit(f"--forms: must be of {'; '.join(FORM)}, but one is {form!r}")
    texts = {"packages": write_corpus(pathlib.Path(flags.FLAGS.folder))}
    if Form("gpt").config().data.task != "python_packages":
        texts |= OWN_TEXT
    for form in wanted:
        if FORM[form].baseline and time_key(form) not in read_results(results_file()):
            add_results(results_file(), {time_key(form): times_of(form)})
    Study("recipe", FORM, "bits_per_byte", plot, texts).run(wanted)


if __name__ == "__main__":
    app.run(main)
