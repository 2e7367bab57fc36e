"""The kernels by torch's operators: they run on any card that torch runs on, and on the CPU for tests.

Nothing is read back and no shape depends on numbers, so that CUDA graphs can hold them.
"""
