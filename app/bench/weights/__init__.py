"""Suite `weights`: one chat with a model that GPU memory holds a part of, in the ways that there are for it.

HeteGen's figure 8, on this computer: how many tokens a second come with so much of the weights in GPU memory.
At the same memory, three ways take turns:

    divided      rows of each matrix: GPU, bus and CPU work on each product at the same time
    streaming    the first layers are on the GPU; the others cross the bus for each token, ahead of their use
    layer split  the first layers are on the GPU; the CPU computes the others, and one waits for the other

The last two are what others do (accelerate, if it pinned memory and looked ahead; llama.cpp's `-ngl`), by the
same engine and kernels. Beside all stands what CPU and bus allow together.
"""
