"""Who computes which tokens next, and where their KV lies: bookkeeping without tensors."""
