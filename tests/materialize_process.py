"""Materialize the runs in some folders, in blocks of 4 MiB; print by how many bytes the last one raised the peak of
this process's resident memory.
"""

import functools
import pathlib
import re
import sys

from diffeqformer import materialize
from diffeqformer.inference.discretize import discretized_arrays

materialize.discretized_arrays = functools.partial(discretized_arrays, bytes_at_once=2**22)
peaks = []
for folder in sys.argv[1:]:
    materialize.materialize(folder)
    peaks.append(1024 * int(re.search(r"VmHWM:\s+(\d+) kB", pathlib.Path("/proc/self/status").read_text())[1]))
print(peaks[-1] - peaks[-2])
