"""Models: a vector field, depth weights and a solver, between an embedding and a head (see `transformer`).

Nothing is imported here: `diffeqformer.solvers` needs parts of this package, and `transformer` needs the solvers.
"""
