"""Training with the split, and the passes between dense GEMMs."""
