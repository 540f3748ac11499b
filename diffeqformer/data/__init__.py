"""Data: SeqIO task -> token store -> `batch(step)`.

`tasks`, `builders` and `worker` need TensorFlow and run in processes of their own; `tokenizers` and
`store` are all that training imports.
"""

CORPORA = ("python_stdlib", "wikitext103", "wikitext103_raw", "openwebtext")
"""The corpora of `diffeqformer.data.tasks`: known without importing TensorFlow."""
