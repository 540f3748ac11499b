"""What a run will need on TPUs that need not be there, by the TPU compiler (docs/scaling.md)."""
