"""Models in GGUF files, the format of llama.cpp.

- `container`: the file format: metadata and tensor locations
- `types`: the quantisation types, and their dequantisation
- `tensors`: a model's tensors under the decoder's names and in its row order
- `config`: metadata → `ModelConfig`
- `traced`: the same for architectures that only `transformers` knows; the names of their tensors
- `tokenizer`: metadata → `Tokenizer`; `pre_tokenizers` has the split patterns of the vocabularies
- `checkpoint`: loads a model from these parts
- `writer`: writes GGUF files, for comparisons with llama.cpp
"""
