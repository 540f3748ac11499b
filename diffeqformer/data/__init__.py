"""Data: SeqIO task -> token store on disk -> `batch(step)`.

`tasks` and `prepare` need TensorFlow and run in a process of their own; `tokenizers` and `store` are
all that training imports.
"""

TASK_TOKENIZERS = {"python_stdlib": "bytes"}
"""The tasks of `diffeqformer.data.tasks` and the tokenizer of each: known without importing TensorFlow."""
