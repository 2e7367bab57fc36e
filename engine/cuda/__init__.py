"""How work gets onto a CUDA GPU: streams, and the slice of it that they may be confined to."""
