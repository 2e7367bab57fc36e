"""Stand-in for llama-cpp-python, whose build takes minutes: the functions that this program calls."""
