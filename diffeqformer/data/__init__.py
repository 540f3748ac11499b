"""Data: SeqIO task -> token store -> `batch(step)`.

`tasks`, `builders`, `perplexity` and `worker` import TensorFlow; `tokenizers` and `store` are all that training
imports, which leaves preparation to processes of their own.
"""

CORPUS_NAMES = ("python_stdlib", "wikitext103", "wikitext103_raw", "openwebtext")
"""The corpora of `diffeqformer.data.tasks`: known without importing TensorFlow."""

TASK_NAME = r"\w[\w.-]*"
TASK_NAME_SAYS = "must be a name of letters, digits, dots, hyphens and underscores"
