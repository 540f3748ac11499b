"""Pallas kernels for TPUs: weights from P, and P's update without its gradient."""
