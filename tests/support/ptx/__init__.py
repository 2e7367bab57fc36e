"""Executes PTX, which Triton compiles for NVIDIA GPUs, on a CPU with numpy.

    parse          text → `Kernel`: instructions with operands
    numbers        types: bits of a register ↔ numbers
    memory         global and shared memory, which check accesses
    threads        registers of many threads, one numpy array each
    arithmetic     the table of instructions that compute
    transfers      those that move data
    matrices       those of tensor cores
    run            executes a kernel: order of programs, warps and instructions
    driver         lets Triton launch kernels so
    engine         a program: whole engines on the imitated GPU

It checks more than a GPU: bounds and alignment. Barriers and waits between accesses to shared memory. Whole
warps, where an instruction needs them. Unknown instructions are errors. Time is not modelled.
"""
