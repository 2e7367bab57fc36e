"""Suite `hardware`: what this computer's processors, memories and the ways between them reach.

Everything else that the self-test measures is bounded by these figures: decoding reads weights and KV, so by
the memories' read rates; prefill by the matrix rates; offloading by the bus and by how long the GPU waits for
the CPU. engine/profiling/host_rates.py, device_rates.py and offload.py hold the timed work.
"""
