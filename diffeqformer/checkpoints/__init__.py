"""Checkpoints: what they hold, where they lie, and whether they are what was saved."""
