"""CUDA streams, pinned host memory, and error handling for NVIDIA GPUs."""
