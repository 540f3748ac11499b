"""Training: the loop, the functions that it compiles, the loss and the optimizer."""
