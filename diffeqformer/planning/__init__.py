"""Whether a run fits devices that need not be there, how long it takes and what it costs (docs/scaling.md)."""
