"""Scheduling without tensors: tokens per request and iteration, KV tiers, preemption."""
