"""Models in GGUF files, the format of llama.cpp.

- `container`: the file format: metadata and tensor locations
- `types`: the quantisation types, and their dequantisation
- `tensors`: tensors in the decoder's row order
- `entries`, `family`, `families`, `hybrids`: metadata of an architecture → the values of a config.json
- `config`: these values → `ModelConfig`
- `names`: tensors → parameters
- `tokenizer`: metadata → `Tokenizer`; `pre_tokenizers` has the split patterns of the vocabularies
- `checkpoint`: loads a model from these parts
"""
