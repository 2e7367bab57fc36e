"""Execution of plans: the layers of one or two sub-batches, with attention next to the KV."""
