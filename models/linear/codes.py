"""GGUF blocks decomposed into codes, scales and minima.

A row of a matrix is cut into blocks of 32 or 256 numbers. A block has a float16 scale, sometimes a minimum,
and a few bits per number. A block of 256 ("K") also has scales of its parts, in 4 to 8 bits. Numbers of less
than a byte are interleaved: the low bits of a run of bytes hold its first numbers, the high bits the others.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
FP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # twice the values, whose scales are halved
UNIT = 256  # numbers in a block of K types; they share a float16 factor on their scales


@dataclass(frozen=True, slots=True)
class Coding:
    """Encoding of a type's numbers: each is `(code - centre) * scale + minimum`, or `table[code] * scale`."""

    bits: int
    centre: int
    has_minima: bool = False
    group: int = 32  # numbers that share a scale
    scale_dtype: torch.dtype = torch.float16
    table: tuple[int, ...] = ()  # of 16 numbers

    @property
    def has_units(self) -> bool:
        """True if scales are integers, to be multiplied by a float16 unit."""
        return not self.scale_dtype.is_floating_point

    @property
    def planes(self) -> tuple[int, ...]:
        """Bits per code in every plane of words, the lowest bits first."""
        low = next(low for low in (8, 4, 2) if low <= self.bits)
        return (low, self.bits - low) if self.bits > low else (low,)

    def shifts(self, plane: int) -> tuple[tuple[int, ...], ...]:
        """Return the positions of a word's codes, `[places of a word][4]`, in a plane of these bits.

        Four codes are in one byte each, for DP4A, or in neighbouring half bytes, for look-ups.
        """
        apart, step = (16, 4) if self.table else (plane, 8)
        return tuple(tuple(apart * place + step * code for code in range(4)) for place in range(8 // plane))


CODINGS = {
    "Q8_0": Coding(8, 128),
    "Q4_0": Coding(4, 8),
    "Q4_1": Coding(4, 0, has_minima=True),
    "Q5_0": Coding(5, 16),
    "Q5_1": Coding(5, 0, has_minima=True),
    "Q2_K": Coding(2, 0, has_minima=True, group=16, scale_dtype=torch.uint8),
    "Q3_K": Coding(3, 4, group=16, scale_dtype=torch.int8),
    "Q4_K": Coding(4, 0, has_minima=True, scale_dtype=torch.uint8),
    "Q5_K": Coding(5, 0, has_minima=True, scale_dtype=torch.uint8),
    "Q6_K": Coding(6, 32, group=16, scale_dtype=torch.int8),
    "IQ4_NL": Coding(4, 0, table=IQ4),
    "IQ4_XS": Coding(4, 0, scale_dtype=torch.int8, table=IQ4),
    "MXFP4": Coding(4, 0, scale_dtype=torch.bfloat16, table=FP4),
}
"""Keys are the names of GGUF types."""


def decode(type_name: str, blocks: Tensor) -> Sequence[Tensor]:  # noqa: PLR0911, PLR0912
    """Decompose blocks `[n, bytes]` into tensors `[n, …]`.

    These are codes (uint8), scales, and minima if the type has them. If scales are integers, the units of
    scales and minima follow.
    """
    b = blocks
    match type_name:
        case "Q8_0":
            return b[:, 2:] ^ 128, _half(b, 0)
        case "Q4_0":
            return _unpacked(b[:, 2:], 4, 16), _half(b, 0)
        case "Q4_1":
            return _unpacked(b[:, 4:], 4, 16), _half(b, 0), _half(b, 2)
        case "Q5_0":
            return _five_bits(b, 2), _half(b, 0)
        case "Q5_1":
            return _five_bits(b, 4), _half(b, 0), _half(b, 2)
        case "Q2_K":
            scales, units = b[:, :16], (_half(b, 80), -_half(b, 82))
            return _unpacked(b[:, 16:80], 2, 32), scales & 15, scales >> 4, *units
        case "Q3_K":
            codes = _unpacked(b[:, 32:96], 2, 32) | (_unpacked(b[:, :32], 1, 32) << 2)
            scales = _unpacked(b[:, 96:104], 4, 8) | (_unpacked(b[:, 104:108], 2, 4) << 4)
            return codes, scales.view(torch.int8) - 32, _half(b, 108)
        case "Q4_K":
            return _unpacked(b[:, 16:], 4, 32), *_six_bits(b), _half(b, 0), -_half(b, 2)
        case "Q5_K":
            codes = _unpacked(b[:, 48:], 4, 32) | (_unpacked(b[:, 16:48], 1, 32) << 4)
            return codes, *_six_bits(b), _half(b, 0), -_half(b, 2)
        case "Q6_K":
            codes = _unpacked(b[:, :128], 4, 64) | (_unpacked(b[:, 128:192], 2, 32) << 4)
            return codes, b[:, 192:208].view(torch.int8), _half(b, 208)
        case "IQ4_NL":
            return _unpacked(b[:, 2:], 4, 16), _half(b, 0)
        case "IQ4_XS":
            return _unpacked(b[:, 8:], 4, 16), _iq4_scales(b), _half(b, 0)
        case "MXFP4":
            return _unpacked(b[:, 1:], 4, 16), _fp4_scales(b).bfloat16()
    raise ValueError(f"{type_name} has no coding")


def dequantised(type_name: str, blocks: Tensor) -> Tensor:
    """Return blocks `[n, bytes]` as float32 `[n, numbers]`."""
    coding = CODINGS[type_name]
    codes, *others = decode(type_name, blocks)
    if coding.has_units:
        half = len(others) // 2
        others = [small * unit.float() for small, unit in zip(others[:half], others[half:], strict=True)]
    scales, *minima = (each.float()[:, :, None] for each in others)
    if coding.table:
        table = torch.tensor(coding.table, dtype=torch.float32, device=codes.device)
        numbers = table.index_select(0, codes.flatten().int())
    else:
        numbers = codes.float().sub_(coding.centre)
    numbers = numbers.view(len(blocks), scales.shape[1], -1).mul_(scales)
    return (numbers.add_(minima[0]) if minima else numbers).flatten(1)


def _half(blocks: Tensor, start: int) -> Tensor:
    return blocks[:, start : start + 2].contiguous().view(torch.float16)


def _unpacked(data: Tensor, bits: int, run: int) -> Tensor:
    """Unpack runs of bytes: `[blocks, bytes]` -> `[blocks, bytes * 8 / bits]`, low bits of a run first."""
    runs = data.reshape(len(data), -1, run)
    return torch.stack([(runs >> shift) & (2**bits - 1) for shift in range(0, 8, bits)], 2).flatten(1)


def _five_bits(blocks: Tensor, start: int) -> Tensor:
    """Unpack numbers of 5 bits: 4 bytes with the fifth bits come first, then four bits per number."""
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    fifth = (blocks[:, start : start + 4, None] >> shifts) & 1
    return _unpacked(blocks[:, start + 4 :], 4, 16) | (fifth.flatten(1) << 4)


def _six_bits(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return scales and minima of Q4_K and Q5_K, eight each; the last four borrow high bits of the first
    four.
    """
    scales, minima, rest = blocks[:, 4:16].reshape(-1, 3, 4).unbind(1)
    scales = torch.cat((scales & 63, (rest & 15) | ((scales >> 2) & 48)), 1)
    minima = torch.cat((minima & 63, (rest >> 4) | ((minima >> 2) & 48)), 1)
    return scales, minima


def _iq4_scales(blocks: Tensor) -> Tensor:
    """Return the scales of IQ4_XS, eight int8 per block."""
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device)
    high = (blocks[:, 2:4, None] >> shifts) & 3
    low = (blocks[:, 4:8, None] >> shifts[:3:2]) & 15
    return (low.flatten(1) | (high.flatten(1) << 4)).view(torch.int8) - 32


def _fp4_scales(blocks: Tensor) -> Tensor:
    """Return the scales of MXFP4, `[blocks, 1]` float32; NaN for the exponent 255."""
    exponents = blocks[:, :1].float()
    return torch.exp2(exponents - 128).masked_fill(exponents == 255, torch.nan)
