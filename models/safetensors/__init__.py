"""Folders of Hugging Face: their tensors, and the ways in which quantised ones are stored.

`scheme` reads what config.json says of them, `packed` and `scaled` turn several tensors of a file into the
one matrix that they stand for.
"""
