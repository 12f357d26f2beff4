"""Who computes. `base` is the contract; `reference` the numpy oracle; `cpu` and `cuda` the hand-written engines."""
