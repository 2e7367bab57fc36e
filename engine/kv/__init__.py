"""The KV cache: block ownership, tensors per tier, and copies between tiers."""
