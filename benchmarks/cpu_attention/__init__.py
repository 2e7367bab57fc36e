"""Decode attention on the CPU against the limits of this machine's memory and cores.

Decode attention reads every key and value once, with `group` multiply-adds each, one per query head that
shares it. So two limits exist, both measured here with the same threads:

    memory        bytes per second of plain reads
    arithmetic    multiply-adds per second in registers / multiply-adds per byte of KV

The smaller one is the limit of a case. A case calls the kernel repeatedly on pages scattered over one large
KV cache, with different pages each time, so that the processor's caches hold none. Both limits are measured
again before and after each sample of calls. The share is the median over samples of (bytes per second of the
calls) / (the limit around them), because other programs disturb both alike.

rivals.py measures other implementations on the same work.
"""
