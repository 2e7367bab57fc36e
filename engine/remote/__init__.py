"""Attention workers: KV and decode attention on other computers, over the network."""
