"""Decode attention on the CPU against what this machine's memory and cores allow.

Decode attention reads every key and value once, and does `group` multiply-adds with each: one per query head
that shares it. So there are two limits, both measured here, with the same threads:

    the memory's       bytes per second that plain reads reach
    the arithmetic's   multiply-adds per second in registers / multiply-adds per byte of KV

and the smaller one is the limit of a case. A case calls the kernel again and again on pages scattered over
one large KV cache, others each time, so that none is found in the processor's caches; before and after
each sample of calls both limits are measured anew. The share reached is the median over samples of (bytes
per second of the calls) / (the limit around them): other programs on the machine disturb both alike.

What others reach on the same work is measured beside it: see rivals.py.
"""
