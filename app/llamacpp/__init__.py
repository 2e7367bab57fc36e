"""Models that the engine cannot run, computed by llama.cpp (llama-cpp-python), behind the same service.

choice.py     chooses the backend of a model, and checks the options.
library.py    wraps llama.cpp's functions; no other module imports llama_cpp.
tokenizer.py  is its tokenizer, in the form of the others.
engine.py     answers one request after the other, with the engine's sampler, stop strings and grammars.
recipe.py     makes one, in a process of its own.
"""
