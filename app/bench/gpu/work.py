"""What an iteration has to read and to compute at least, and how long that takes at measured rates."""

from dataclasses import dataclass

import torch

from neo_desktop.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Work:
    """Of one iteration."""

    nbytes: int  # weights once, and the KV of all requests
    operations: int  # a multiplication and an addition per weight and token; attention not counted

    def memory_s(self, read_gb_per_s: float) -> float:
        """Seconds to read it."""
        return self.nbytes / read_gb_per_s / 1e9

    def arithmetic_s(self, gflop_per_s: float) -> float:
        """Seconds to compute it."""
        return self.operations / gflop_per_s / 1e9


def iteration_work(
    config: ModelConfig, dtype: torch.dtype, context_lens: list[int], new_tokens: int, sampled: int
) -> Work:
    """Return what an iteration cannot do without.

    Args:
        context_lens: tokens of each request, new ones included; their KV is read once.
        new_tokens: of all requests, through the linear stages.
        sampled: requests that get a token, through the output head.
    """
    head = config.vocab_size * config.hidden_size
    tables = head if config.tie_word_embeddings else 2 * head
    layers = config.num_parameters - tables
    layer_kv_bytes = config.kv_bytes_per_token(dtype) // config.num_layers
    kv_tokens = sum(
        min(length, window or length) for length in context_lens for window in config.layer_windows
    )
    weights = layers + (head if sampled else 0)
    return Work(
        nbytes=weights * dtype.itemsize + kv_tokens * layer_kv_bytes,
        operations=2 * (layers * new_tokens + head * sampled),
    )
