"""GPU kernels: decode attention, and the operations between matmuls.

    dispatch       the functions for callers; each selects an implementation by its fallback level.
    occupancy      a kernel's programs that fit on a multiprocessor; splits of a context in decode attention.
    in_triton      Triton kernels.
    in_torch       decode attention with torch's operators, for any GPU, and if Triton or its compiler is
                   missing; `models.operators` has torch's versions of the other kernels.
    toolchain      the check that Triton kernels can be compiled on this computer.

The functions read nothing back, and their launches depend only on shapes, so CUDA graphs can capture them.
Only `in_triton` needs Triton. In the engine, only `cuda` and the fallbacks are below this package.

`engine.kv.device_layer` uses decode attention and row copies, `models.stages` the other functions.
"""
