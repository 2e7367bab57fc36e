"""Suite `throughput`: the same requests with the same weights under one policy after the other.

All requests wait at the start and the engine works until the last has its answer, as for a batch job.
Each policy first runs every request once, to warm up and to compare its answers. Then the policies take
turns, with other prompts of the same lengths in every turn, so that nothing is reused from the turn before.

The limit beside the figures is the closed bound of engine/simulation/bound.py, from tables measured in the
same run: perfect overlap, no waiting, no hand-off.
"""
