"""Analyze a checkpoint: `python -m diffeqformer.analyze --workdir=runs/tiny [--parts=spectra] [--text="..."]`.

Writes one HTML report with figures, together with the numbers behind them. docs/analysis.md explains both.
"""

from collections.abc import Callable
from typing import NamedTuple

from absl import flags

from diffeqformer.analysis import clustering, flow, induction, sensitivity, sharpness, spectra
from diffeqformer.analysis.report import Section, check_text, write
from diffeqformer.checkpoints import checkpoint
from diffeqformer.checkpoints.finite import logits_of
from diffeqformer.console import command_line
from diffeqformer.console.results import header, results_folder, title
from diffeqformer.depth.depths import MOST_STEPS
from diffeqformer.errors import UserError
from diffeqformer.parallel import hosts
from diffeqformer.solvers import SOLVERS
from diffeqformer.transformer import check_weights

TEXT = "The committee met on Tuesday because the committee had not met on Monday, and the chairman of the committee"


class Analysis(NamedTuple):
    """A part of the report. Its file in `diffeqformer/analysis/` has the function `section`.

    section: computes it from an opened checkpoint, the ids of a text if it `reads_text`, and `num_steps`.
    options: the command's options that `section` takes as well, as arguments of the same names.
    """

    section: Callable[..., Section]
    reads_text: bool = False
    options: tuple[str, ...] = ()


ANALYSES = {
    "spectra": Analysis(spectra.section, options=("times", "feed_forward")),
    "induction": Analysis(induction.section),
    "sharpness": Analysis(sharpness.section, reads_text=True),
    "sensitivity": Analysis(sensitivity.section, reads_text=True, options=("published_pairing",)),
    "flow": Analysis(flow.section, reads_text=True, options=("flow",)),
    "clustering": Analysis(clustering.section, reads_text=True),
}
"""The parts of the report by their name in `--parts`, in order."""


def check_used(options: flags.FlagValues) -> None:
    """Reject an option that was given, but that no part of the report reads."""
    for name in sorted({"text"}.union(*(each.options for each in ANALYSES.values()))):
        parts = [part for part, each in ANALYSES.items() if name in (*each.options, *["text"] * each.reads_text)]
        if options[name].present and not {*parts} & {*options.parts}:
            raise UserError(f"--{name}: has a meaning for {' or '.join(parts)} alone, which --parts leaves out")


def check(options, opened: checkpoint.Checkpoint) -> None:
    """Raise a UserError for an option that doesn't fit the model, before anything is computed."""
    model = opened.model
    if not options.parts or not set(options.parts) <= set(ANALYSES):
        raise UserError(f"--parts: must be of {', '.join(ANALYSES)}, but it is {','.join(options.parts)!r}")
    if options.times and not model.depth.continuous:
        raise UserError("--times: must be left out for this model, whose weights aren't functions of time")
    if options.published_pairing and not (model.depth.continuous and model.solver == SOLVERS["euler"]):
        raise UserError("--published_pairing: the authors' pairing of times needs generated weights and Euler's method")
    if model.depth.fixed_depth:
        check_weights(model, options.num_steps)


def analyze(options) -> list[Section]:
    """Analyze a checkpoint according to the options; the report is written after each part."""
    hosts.check_one("analyze: this command")
    opened = checkpoint.load(options.workdir, step=options.step)
    config = opened.config
    check(options, opened)
    ids = []
    if any(ANALYSES[part].reads_text for part in options.parts):
        ids = opened.tokenizer.encode(TEXT if options.text is None else options.text)
        ids = ids[: opened.model.max_length] if options.text is None else ids
        check_text(opened.model, ids, "--text")
    folder = results_folder(options.output, options.workdir, "analysis")
    about = {
        **header(options.workdir, opened),
        "num_steps": options.num_steps or config.model.num_steps,
        "heads": config.model.heads,
        **({"text": opened.tokenizer.decode(ids)} if ids else {}),
    }
    done = []
    for name, analysis in ANALYSES.items():
        if name in options.parts:
            print(name, flush=True)
            values = {option: getattr(options, option) for option in analysis.options}
            text = [ids] if analysis.reads_text else []
            with logits_of(f"{options.workdir}, checkpoint {opened.step}"):
                done.append(analysis.section(opened, *text, num_steps=options.num_steps, **values))
            write(folder, f"{title(config)} at step {opened.step:,}", about, done)
    print(f"\nreport.html, results.json and arrays.npz are in {folder}", flush=True)
    return done


if __name__ == "__main__":
    flags.DEFINE_string("workdir", None, "Folder of the run, or of a materialized model.", required=True)
    command_line.define_step()
    flags.DEFINE_list("parts", list(ANALYSES), "Parts of the report.")
    flags.DEFINE_string("text", None, f"Text whose last token is explained by earlier ones; by default {TEXT!r}.")
    bounds = {"lower_bound": 1, "upper_bound": MOST_STEPS}
    flags.DEFINE_integer("num_steps", None, "Steps of depth; by default as in training.", **bounds)
    flags.DEFINE_integer("times", None, "Times at which spectra are computed; by default the solver's own.", **bounds)
    flags.DEFINE_bool("feed_forward", True, "Also compute the feed-forward's spectra, which take longest.")
    flags.DEFINE_integer("flow", 32, "Number of exponents of the whole flow.", lower_bound=1)
    flags.DEFINE_bool("published_pairing", False, "Pair times and states of the sensitivity as the authors' code does.")
    help_text = "Folder of the results; by default a new one in <workdir>/analysis, or within runs/ for one on gs://."
    flags.DEFINE_string("output", None, help_text)

    def command() -> None:
        check_used(flags.FLAGS)
        analyze(flags.FLAGS)

    command_line.run(command)
