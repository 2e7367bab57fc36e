"""Models in GGUF files, the format of llama.cpp.

container   what a file says of itself: metadata, and where its tensors lie
types       the ways in which numbers are stored, and what they are as floats
tensors     the tensors of a model, under the names and in the order that a decoder knows them by
config      metadata → `ModelConfig`
traced      likewise, of architectures that only `transformers` knows; and the names of their tensors
tokenizer   metadata → `Tokenizer`; `pre_tokenizers` has the patterns of the vocabularies
checkpoint  all of this, for loading a model
writer      the way back, for comparisons with llama.cpp
"""
