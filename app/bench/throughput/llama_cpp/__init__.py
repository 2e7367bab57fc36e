"""llama.cpp as a rival in the suite `throughput`: the same weights, the same requests.

gguf_file  writes the loaded model as a file that llama.cpp reads
library    calls llama.cpp
batching   keeps its batches full, as its server does
worker     the process in which all that runs
baseline   hands it the work of the policies, and reads what it found
"""
