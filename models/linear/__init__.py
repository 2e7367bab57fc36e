"""Linear layers: what lies in memory, and what multiplies with it. A new form is a file beside these.

protocol    what a linear layer is, and what is asked of a form before a model is loaded
packed      what matrices of a CPU have in common: tiles of 16 rows
plain       rows of numbers, multiplied by torch: on a GPU
tiles       numbers of 16 rows side by side, multiplied by the native kernels: on a CPU
quantised   packed blocks of 4 to 8 bits with the numbers of GGUF files, multiplied by the native kernels
quantised_gpu   the same on a GPU; grouped and codes: how they lie there
split       rows on a device, the others in host memory: streamed to it, or computed by the CPU
unpack      quantised tiles of a CPU as numbers on a device
dense       the form that models have so far: numbers of the model's dtype, by whichever of these is faster
"""
