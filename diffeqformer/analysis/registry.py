"""The analyses of a checkpoint, in the order of the report.

Each has a file of its own with a function `section(opened, ids, *, num_steps, ...)`, without `ids` if it reads no text,
that gives a `report.Section`. To add one, write such a file and add a row here under the name that `--parts` takes.
Options of the command are defined in `diffeqformer.analyze.define_flags`.
"""

import dataclasses
from collections.abc import Callable

from diffeqformer.analysis import clustering, flow, induction, sensitivity, spectra
from diffeqformer.analysis.report import Section


@dataclasses.dataclass(frozen=True)
class Analysis:
    """One row of `ANALYSES`.

    section: computes what was found: a function of an opened checkpoint.
    reads_text: whether it takes the ids of a text after the checkpoint.
    options: the command's options that it takes, as arguments of the same names, beside `num_steps`.
    """

    section: Callable[..., Section]
    reads_text: bool = False
    options: tuple[str, ...] = ()


ANALYSES = {
    "spectra": Analysis(spectra.section, options=("times", "heads", "feed_forward")),
    "induction": Analysis(induction.section),
    "sensitivity": Analysis(sensitivity.section, reads_text=True, options=("published_pairing",)),
    "flow": Analysis(flow.section, reads_text=True, options=("flow",)),
    "clustering": Analysis(clustering.section, reads_text=True),
}
