"""Data: corpus -> token store -> `batch(step)`.

`corpora`, `tasks` and `language_model` import TensorFlow; so do commands that score a corpus. Training
doesn't: it leaves preparation to the processes of `worker`, which read a corpus by SeqIO. Local files, and where SeqIO
isn't installed the corpora, are read by `sources` and `texts` alone, with the same ids.
"""

CORPUS_NAMES = ("python_stdlib", "wikitext103", "wikitext103_raw", "openwebtext")
"""The names of the corpora in `diffeqformer.data.corpora`, available without importing TensorFlow."""

TASK_NAME = r"\w[\w.-]{0,99}"
TASK_NAME_SAYS = "must be a name of letters, digits, dots, hyphens and underscores, at most 100 of them"
