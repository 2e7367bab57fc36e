"""Attention workers: other computers that hold KV and attend to it, layer by layer, over the network."""
