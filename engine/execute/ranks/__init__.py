"""Tensor parallelism among processes: rank 0 plans, all ranks execute."""
