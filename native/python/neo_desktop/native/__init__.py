"""Native kernels: decode attention over a paged KV cache on the CPU."""

from neo_desktop.native._native import cpu_features, default_num_threads

__all__ = ["cpu_features", "default_num_threads"]
