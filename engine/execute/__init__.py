"""Carries out plans: the layers of one or two sub-batches, with attention where the KV lies."""
