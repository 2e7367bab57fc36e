"""Upper limits of model sizes."""

import math

# Several times the sizes of real models. A larger number is refused before anything is allocated; smaller
# numbers are compared with the weights (`registry.check_model`).
MAX_LAYERS = 1024
MAX_HIDDEN_SIZE = 2**18
MAX_INTERMEDIATE_SIZE = 2**20
MAX_HEADS = 2**12
MAX_HEAD_DIM = 2**12
MAX_VOCAB_SIZE = 2**23
MAX_CONTEXT_TOKENS = 2**31 - 1

# Head sizes that the attention kernels support: multiples of the unit, up to the largest.
HEAD_UNIT = 8
LARGEST_HEAD = 576

# Minimum and maximum of a request's sampling parameters.
SAMPLING_BOUNDS = {
    "temperature": (0.0, 100.0),
    "top_p": (math.ulp(0.0), 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
}
