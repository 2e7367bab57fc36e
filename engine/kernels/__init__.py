"""The GPU's half of an iteration: decode attention, and what lies between matrix products.

    dispatch       what others call: each function by the level of the fallbacks that its mechanism stands on
    splits         into how many parts decode attention cuts contexts
    occupancy      how many programs of a kernel a multiprocessor holds at once
    in_triton      Triton kernels
    in_torch       decode attention by torch's operators, for any card, and where Triton or its compiler is
                   missing; what serves there for the other kernels is `models.operators`

    toolchain      whether Triton's can be compiled here

The functions read nothing back, and what they launch follows from shapes alone: CUDA graphs can hold it. All
but `in_triton` does without Triton. They are lower than all else in the engine but `cuda` and the fallbacks.

`engine.kv.device_layer` uses decode attention and copies of rows, `models.stages` the others.
"""
