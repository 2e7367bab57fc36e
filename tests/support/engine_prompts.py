"""Prompts of very different lengths, and their greedy settings."""

import torch
from checkpoints import VOCAB_SIZE

from neo_desktop import SamplingParams

GREEDY = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)


def prompts(count: int, seed: int = 1) -> list[list[int]]:
    """Return prompts of very different lengths, some across many blocks."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [1, 16, 17, 33, 7, 150, 64, 90][:count]
    return [torch.randint(VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]
