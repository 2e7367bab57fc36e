"""Counts kernels compiled at start-up, and kernels compiled later by iterations of many kinds.

A program, because other processes may use Triton's interpreter; see `compile_kernels`.
"""

from dataclasses import replace
from typing import Any

import torch
from compile_kernels import AbsentGPU, compile_instead_of_launching
from triton.runtime.driver import driver

from neo_desktop.engine.fallbacks import fallbacks
from neo_desktop.engine.kernels.dispatch import rope_append
from neo_desktop.engine.kv import device_layer
from neo_desktop.engine.kv.device_layer import DeviceLayer
from neo_desktop.engine.kv.layer import DecodeRows
from neo_desktop.engine.kv.storage import KVPool
from neo_desktop.models.attention import AttentionSpec
from neo_desktop.models.shapes import shape

HEADS, KV_HEADS, HEAD_DIM = 8, 2, 64
NUMBERS = torch.zeros(1 << 16, dtype=torch.int32)


def numbers(first: int, count: int) -> torch.Tensor:
    """Return a slice of a larger tensor, at any address that is a multiple of 4."""
    return NUMBERS[first : first + count]


def rotate(pool: KVPool, first: int, tokens: int) -> None:
    """Rotate and store like a graph; the slots of sub-batches share one tensor."""
    qkv = torch.empty(tokens, (HEADS + 2 * KV_HEADS) * HEAD_DIM, dtype=torch.float16)
    angles = torch.empty(tokens, 1, HEAD_DIM)
    k_caches, v_caches = pool.parts
    rope_append(qkv, angles, angles, numbers(first, tokens), k_caches[0], v_caches[0], None, 1e-6)


def main() -> None:
    found: list[tuple[str, Any]] = []
    compile_instead_of_launching(found)
    driver.set_active(AbsentGPU(75))
    device_layer.num_sms = lambda device: 40
    config = replace(shape("tiny"), num_layers=2, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM)
    pool = KVPool(config, 512, 16, torch.float16, torch.device("cpu"), DeviceLayer)
    rotate(pool, 0, 4)  # the warm-up of graphs does this
    at_start = {id(kernel) for _, kernel in found}
    for layer, (requests, max_blocks, window) in enumerate(
        [(1, 1, None), (2, 17, 1), (3, 16, 64), (7, 100, 700), (33, 5, None), (100, 256, 4096)]
    ):
        # The model's tensors: rows of one product, decodes after an odd number of prompt tokens.
        qkv = torch.empty(requests + 3, HEADS + 2 * KV_HEADS, HEAD_DIM, dtype=torch.float16)[3:]
        rotated = torch.empty(requests + 3, HEADS + KV_HEADS, HEAD_DIM, dtype=torch.float16)[3:]
        decoding = pool.layer(layer % 2)
        decoding.spec = AttentionSpec(0.125, window)
        decoding.decode(
            DecodeRows(
                rotated[:, :HEADS],
                numbers(layer, requests * max_blocks).view(requests, max_blocks),
                numbers(layer + 1, requests),
                torch.empty(requests, HEADS, HEAD_DIM, dtype=torch.float16),
                rotated[:, HEADS:],
                qkv[:, -KV_HEADS:],
                numbers(2 * requests, 2 * requests).view(torch.int64),
            )
        )
        rotate(pool, layer, requests)
        rows = torch.empty(2, requests, KV_HEADS, HEAD_DIM, dtype=torch.float16)
        pool.layer(layer % 2).read(numbers(2 * requests, 2 * requests).view(torch.int64), rows)
    assert not fallbacks.limits()
    print(len(at_start), len({id(kernel) for _, kernel in found} - at_start))


if __name__ == "__main__":
    main()
