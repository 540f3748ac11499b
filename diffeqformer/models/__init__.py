"""Models: a vector field, depth weights and a solver, between an embedding and a tied head."""

from diffeqformer.models.transformer import MODELS, Transformer

__all__ = ["MODELS", "Transformer"]
