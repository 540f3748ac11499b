"""Depth weights: where the weights at the solver's times come from."""
