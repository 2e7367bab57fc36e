"""Hugging Face folders: their tensors, and the storage of quantised ones.

`scheme` reads the quantisation settings of config.json. `packed` and `scaled` combine the tensors of a
quantised matrix.
"""
