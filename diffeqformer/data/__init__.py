"""Data: SeqIO task -> token store -> `batch(step)`.

`corpora`, `tasks`, `language_model` and `builders` import TensorFlow; so do the processes of `worker`, and commands
that score a corpus. Training doesn't: it leaves preparation to those processes. Where SeqIO isn't installed, they make
the same store from `sources` and `texts`.
"""

CORPUS_NAMES = ("python_stdlib", "wikitext103", "wikitext103_raw", "openwebtext")
"""The names of the corpora in `diffeqformer.data.corpora`, available without importing TensorFlow."""

TASK_NAME = r"\w[\w.-]{0,99}"
TASK_NAME_SAYS = "must be a name of letters, digits, dots, hyphens and underscores, at most 100 of them"
