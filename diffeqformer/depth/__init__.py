"""Depth weights: where the weights at the solver's times come from.

Each kind is a class derived from `weights.DepthWeights`. The rows of `diffeqformer.transformer.MODELS` name them.
"""
