"""Analyses of a trained model: sections 5, B, C.8, E and F of the paper. Nothing here needs TensorFlow."""
