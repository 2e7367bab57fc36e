"""Executes PTX, the assembly language that Triton compiles for NVIDIA GPUs, on a CPU with numpy.

    parse          text → `Kernel`: instructions with operands
    numbers        types: bits of a register ↔ numbers
    memory         global and shared memory, which find bad accesses and missing barriers
    threads        registers of many threads, one numpy array each
    arithmetic     the table of instructions that compute; `transfers`: that move data; `matrices`: tensor cores
    run            executes a kernel: order of programs, warps and instructions
    driver         lets Triton launch kernels so

It checks more than a GPU does: bounds, alignment, shared memory read before it is written or without a barrier or
wait, and warp-wide instructions in a part of a warp. Unknown instructions are errors. It knows nothing of time.
"""
