"""Stands for llama-cpp-python, whose build takes minutes: what this program calls of it, without a model."""
