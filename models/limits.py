"""How large the sizes of a model may be."""

import math

# Several times what any model has. A number that is beyond is refused before anything is made of that size;
# the others are compared with the weights (`registry.check_model`).
MAX_LAYERS = 1024
MAX_HIDDEN_SIZE = 2**18
MAX_INTERMEDIATE_SIZE = 2**20
MAX_HEADS = 2**12
MAX_HEAD_DIM = 2**12
MAX_VOCAB_SIZE = 2**23
MAX_CONTEXT_TOKENS = 2**31 - 1

# Heads that the kernels of attention compute: a multiple of the unit, up to the largest.
HEAD_UNIT = 8
LARGEST_HEAD = 256

# What a request may ask for: the least and the most.
SAMPLING_BOUNDS = {
    "temperature": (0.0, 100.0),
    "top_p": (math.ulp(0.0), 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
}
