"""The quantisation types of GGUF files, and their dequantisation.

A row of a matrix is cut into blocks of 32 or 256 numbers. A block has a float16 scale, sometimes a minimum,
and a few bits per number. A block of 256 ("K") also has scales of its parts, in 4 to 8 bits. Numbers of less
than a byte are interleaved: the low bits of a run of bytes hold its first numbers, the high bits the others.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# Elements to dequantise at once: intermediate results should stay in the processor's caches.
PIECE_ELEMENTS = 2**20
IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
FP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # twice the values, whose scales are halved


@dataclass(frozen=True, slots=True)
class StoredType:
    """A quantisation type or dtype."""

    name: str
    elements: int  # per block
    nbytes: int  # per block
    floats: Callable[[Tensor], Tensor]  # [blocks, nbytes] uint8 -> [blocks, elements] float32
    dtype: torch.dtype | None = None  # that represents the numbers exactly; None: quantised

    def dequantised(self, raw: Tensor) -> Tensor:
        """Return rows of bytes `[rows, row_bytes]` as float32 `[rows, columns]`, contiguous."""
        return self.floats(raw.reshape(-1, self.nbytes)).view(len(raw), -1)


def _half(blocks: Tensor, start: int) -> Tensor:
    """Return the float16 at an offset of every block, `[blocks, 1]` float32."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def unpacked(data: Tensor, bits: int, run: int) -> Tensor:
    """Unpack runs of bytes: `[blocks, bytes]` -> `[blocks, bytes * 8 / bits]`, low bits of a run first."""
    runs = data.reshape(len(data), -1, run)
    return torch.stack([(runs >> shift) & (2**bits - 1) for shift in range(0, 8, bits)], 2).flatten(1)


def _scaled(numbers: Tensor, scales: Tensor, minima: Tensor | None = None) -> Tensor:
    """Compute `numbers * scales + minima`; each of a block's equal parts has its own scale."""
    parts = numbers.float().view(*scales.shape, -1)
    parts *= scales[:, :, None]
    if minima is not None:
        parts += minima[:, :, None]
    return parts.flatten(1)


def _looked_up(numbers: Tensor, values: tuple[int, ...]) -> Tensor:
    table = torch.tensor(values, dtype=torch.float32, device=numbers.device)
    return table.index_select(0, numbers.flatten().int()).view(numbers.shape)


def _q8_0(blocks: Tensor) -> Tensor:
    return _scaled(blocks[:, 2:].view(torch.int8), _half(blocks, 0))


def _q4_0(blocks: Tensor) -> Tensor:
    return _scaled(unpacked(blocks[:, 2:], 4, 16).view(torch.int8) - 8, _half(blocks, 0))


def _q4_1(blocks: Tensor) -> Tensor:
    return _scaled(unpacked(blocks[:, 4:], 4, 16), _half(blocks, 0), _half(blocks, 2))


def five_bits(blocks: Tensor, start: int) -> Tensor:
    """Unpack numbers of 5 bits: 4 bytes with the fifth bits come first, then four bits per number."""
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    fifth = (blocks[:, start : start + 4, None] >> shifts) & 1
    return unpacked(blocks[:, start + 4 :], 4, 16) | (fifth.flatten(1) << 4)


def _q5_0(blocks: Tensor) -> Tensor:
    return _scaled(five_bits(blocks, 2).view(torch.int8) - 16, _half(blocks, 0))


def _q5_1(blocks: Tensor) -> Tensor:
    return _scaled(five_bits(blocks, 4), _half(blocks, 0), _half(blocks, 2))


def _q2_k(blocks: Tensor) -> Tensor:
    scales = _half(blocks, 80) * (blocks[:, :16] & 15)
    minima = _half(blocks, 82) * (blocks[:, :16] >> 4)
    return _scaled(unpacked(blocks[:, 16:80], 2, 32), scales, -minima)


def _q3_k(blocks: Tensor) -> Tensor:
    low = unpacked(blocks[:, 96:104], 4, 8)
    high = unpacked(blocks[:, 104:108], 2, 4)
    scales = _half(blocks, 108) * ((low | (high << 4)).view(torch.int8) - 32)
    numbers = unpacked(blocks[:, 32:96], 2, 32) | (unpacked(blocks[:, :32], 1, 32) << 2)
    return _scaled(numbers.view(torch.int8) - 4, scales)


def six_bits(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return scales and minima of Q4_K and Q5_K, eight each; the last four borrow high bits of the first
    four.
    """
    scales, minima, rest = blocks[:, 4:16].reshape(-1, 3, 4).unbind(1)
    scales = torch.cat((scales & 63, (rest & 15) | ((scales >> 2) & 48)), 1)
    minima = torch.cat((minima & 63, (rest >> 4) | ((minima >> 2) & 48)), 1)
    return scales, minima


def _scales_and_minima(blocks: Tensor) -> tuple[Tensor, Tensor]:
    scales, minima = six_bits(blocks)
    return _half(blocks, 0) * scales, _half(blocks, 2) * minima


def _q4_k(blocks: Tensor) -> Tensor:
    scales, minima = _scales_and_minima(blocks)
    return _scaled(unpacked(blocks[:, 16:], 4, 32), scales, -minima)


def _q5_k(blocks: Tensor) -> Tensor:
    scales, minima = _scales_and_minima(blocks)
    numbers = unpacked(blocks[:, 48:], 4, 32) | (unpacked(blocks[:, 16:48], 1, 32) << 4)
    return _scaled(numbers, scales, -minima)


def _q6_k(blocks: Tensor) -> Tensor:
    scales = _half(blocks, 208) * blocks[:, 192:208].view(torch.int8)
    numbers = unpacked(blocks[:, :128], 4, 64) | (unpacked(blocks[:, 128:192], 2, 32) << 4)
    return _scaled(numbers.view(torch.int8) - 32, scales)


def _iq4_nl(blocks: Tensor) -> Tensor:
    return _scaled(_looked_up(unpacked(blocks[:, 2:], 4, 16), IQ4), _half(blocks, 0))


def iq4_scales(blocks: Tensor) -> Tensor:
    """Return the scales of IQ4_XS, eight int8 per block."""
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device)
    high = (blocks[:, 2:4, None] >> shifts) & 3
    low = (blocks[:, 4:8, None] >> shifts[:3:2]) & 15
    return (low.flatten(1) | (high.flatten(1) << 4)).view(torch.int8) - 32


def _iq4_xs(blocks: Tensor) -> Tensor:
    scales = _half(blocks, 0) * iq4_scales(blocks)
    return _scaled(_looked_up(unpacked(blocks[:, 8:], 4, 16), IQ4), scales)


def fp4_scales(blocks: Tensor) -> Tensor:
    """Return the scales of MXFP4, `[blocks, 1]` float32; NaN for the exponent 255."""
    exponents = blocks[:, :1].float()
    return torch.exp2(exponents - 128).masked_fill(exponents == 255, torch.nan)


def _mxfp4(blocks: Tensor) -> Tensor:
    """The scale is a power of two; a byte holds its exponent."""
    return _scaled(_looked_up(unpacked(blocks[:, 1:], 4, 16), FP4), fp4_scales(blocks))


def _plain(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda blocks: blocks.contiguous().view(dtype).float()


TYPES = {
    0: StoredType("F32", 1, 4, _plain(torch.float32), torch.float32),
    1: StoredType("F16", 1, 2, _plain(torch.float16), torch.float16),
    30: StoredType("BF16", 1, 2, _plain(torch.bfloat16), torch.bfloat16),
    8: StoredType("Q8_0", 32, 34, _q8_0),
    2: StoredType("Q4_0", 32, 18, _q4_0),
    3: StoredType("Q4_1", 32, 20, _q4_1),
    6: StoredType("Q5_0", 32, 22, _q5_0),
    7: StoredType("Q5_1", 32, 24, _q5_1),
    10: StoredType("Q2_K", 256, 84, _q2_k),
    11: StoredType("Q3_K", 256, 110, _q3_k),
    12: StoredType("Q4_K", 256, 144, _q4_k),
    13: StoredType("Q5_K", 256, 176, _q5_k),
    14: StoredType("Q6_K", 256, 210, _q6_k),
    20: StoredType("IQ4_NL", 32, 18, _iq4_nl),
    23: StoredType("IQ4_XS", 256, 136, _iq4_xs),
    39: StoredType("MXFP4", 32, 17, _mxfp4),
}
"""Keys are the type numbers in files."""
