"""The analyses of a checkpoint, in the order of the report.

Each has its own file with a function `section(opened, ids, *, num_steps, ...)`, without `ids` if it reads no text. It
returns a `report.Section`. To add an analysis, write such a file and add a row here. The row's key is its name in
`--parts`. Options of the command are defined in `diffeqformer.analyze.define_flags`.
"""

import dataclasses
from collections.abc import Callable

from diffeqformer.analysis import clustering, flow, induction, sensitivity, sharpness, simulation, spectra
from diffeqformer.analysis.report import Section


@dataclasses.dataclass(frozen=True)
class Analysis:
    """One row of `ANALYSES`.

    section: computes the section from an opened checkpoint.
    reads_text: whether `section` takes the ids of a text after the checkpoint.
    by_default: whether it is part of a report that asks for no parts.
    options: the command's options that `section` takes besides `num_steps`, as arguments of the same names.
    """

    section: Callable[..., Section]
    reads_text: bool = False
    by_default: bool = True
    options: tuple[str, ...] = ()


ANALYSES = {
    "spectra": Analysis(spectra.section, options=("times", "heads", "feed_forward")),
    "induction": Analysis(induction.section),
    "sharpness": Analysis(sharpness.section, reads_text=True),
    "sensitivity": Analysis(sensitivity.section, reads_text=True, options=("published_pairing",)),
    "flow": Analysis(flow.section, reads_text=True, options=("flow",)),
    "clustering": Analysis(clustering.section, reads_text=True),
    "simulation": Analysis(simulation.section, by_default=False),  # has nothing to do with the checkpoint
}
