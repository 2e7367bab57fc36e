"""Models that the engine has not, computed by llama.cpp (llama-cpp-python), behind the same service.

choice.py     which backend a model gets, and whether the options suit it
library.py    llama.cpp's functions as this program needs them: the only place that imports llama_cpp
tokenizer.py  its tokenizer, in the form of the others
engine.py     one request after the other, with the engine's sampler, stop strings and grammars
recipe.py     makes one, in a process of its own
"""

LLAMACPP_NOTE = (
    "llama.cpp computes this model, not neo-desktop's own engine: there is no offloading by NEO, requests "
    "are answered one after the other, and the scheduler has no figures."
)
