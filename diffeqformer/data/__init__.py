"""Data: corpus -> token store -> `batch(step)`.

`tasks` imports TensorFlow; so does the preparation of a corpus that a module of the user's adds. Training
doesn't: it leaves preparation to the processes of `worker`.
"""
