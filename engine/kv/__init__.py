"""The KV cache: who owns which blocks, the tensors they lie in, and the ways between the two memories."""
