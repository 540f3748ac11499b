"""Training: the loop, the programs that it compiles, and their loss and optimizer."""
