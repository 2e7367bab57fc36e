"""How large the sizes of a model may be."""

# Several times what any model has. A number that is beyond is refused before anything is made of that size;
# the others are compared with the weights (`registry.check_model`).
MAX_LAYERS = 1024
MAX_HIDDEN_SIZE = 2**18
MAX_INTERMEDIATE_SIZE = 2**20
MAX_HEADS = 2**12
MAX_HEAD_DIM = 2**12
MAX_VOCAB_SIZE = 2**23
MAX_CONTEXT_TOKENS = 2**31 - 1
