"""GGUF blocks decomposed for a GPU: codes, scales and minima."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from neo_desktop.models.gguf.types import FP4, IQ4, five_bits, fp4_scales, iq4_scales, six_bits, unpacked

UNIT = 256  # numbers in a block of K types; they share a float16 factor on their scales


@dataclass(frozen=True, slots=True)
class Coding:
    """Encoding of a type's numbers: each is `(code - centre) * scale + minimum`, or `table[code] * scale`."""

    bits: int
    centre: int
    has_minima: bool = False
    group: int = 32  # numbers that share a scale
    scale_dtype: torch.dtype = torch.float16
    is_wider: bool = False  # codes have more bits than in files
    table: tuple[int, ...] = ()  # of 16 numbers

    @property
    def has_units(self) -> bool:
        """True if scales are integers, to be multiplied by a float16 unit."""
        return not self.scale_dtype.is_floating_point

    @property
    def shifts(self) -> tuple[int, ...]:
        """Positions of a word's codes: neighbours in bytes, for DP4A, or in half bytes, for look-ups."""
        places = range(32 // self.bits)
        return tuple(4 * each if self.table else each % 4 * 8 + each // 4 * self.bits for each in places)


CODINGS = {
    "Q8_0": Coding(8, 128),
    "Q4_0": Coding(4, 8),
    "Q4_1": Coding(4, 0, has_minima=True),
    "Q5_0": Coding(8, 16, is_wider=True),
    "Q5_1": Coding(8, 0, has_minima=True, is_wider=True),
    "Q2_K": Coding(2, 0, has_minima=True, group=16, scale_dtype=torch.uint8),
    "Q3_K": Coding(4, 4, group=16, scale_dtype=torch.int8, is_wider=True),
    "Q4_K": Coding(4, 0, has_minima=True, scale_dtype=torch.uint8),
    "Q5_K": Coding(8, 0, has_minima=True, scale_dtype=torch.uint8, is_wider=True),
    "Q6_K": Coding(8, 32, group=16, scale_dtype=torch.int8, is_wider=True),
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
            return unpacked(b[:, 2:], 4, 16), _half(b, 0)
        case "Q4_1":
            return unpacked(b[:, 4:], 4, 16), _half(b, 0), _half(b, 2)
        case "Q5_0":
            return five_bits(b, 2), _half(b, 0)
        case "Q5_1":
            return five_bits(b, 4), _half(b, 0), _half(b, 2)
        case "Q2_K":
            scales, units = b[:, :16], (_half(b, 80), -_half(b, 82))
            return unpacked(b[:, 16:80], 2, 32), scales & 15, scales >> 4, *units
        case "Q3_K":
            codes = unpacked(b[:, 32:96], 2, 32) | (unpacked(b[:, :32], 1, 32) << 2)
            scales = unpacked(b[:, 96:104], 4, 8) | (unpacked(b[:, 104:108], 2, 4) << 4)
            return codes, scales.view(torch.int8) - 32, _half(b, 108)
        case "Q4_K":
            return unpacked(b[:, 16:], 4, 32), *six_bits(b), _half(b, 0), -_half(b, 2)
        case "Q5_K":
            codes = unpacked(b[:, 48:], 4, 32) | (unpacked(b[:, 16:48], 1, 32) << 4)
            return codes, *six_bits(b), _half(b, 0), -_half(b, 2)
        case "Q6_K":
            codes = unpacked(b[:, :128], 4, 64) | (unpacked(b[:, 128:192], 2, 32) << 4)
            return codes, b[:, 192:208].view(torch.int8), _half(b, 208)
        case "IQ4_NL":
            return unpacked(b[:, 2:], 4, 16), _half(b, 0)
        case "IQ4_XS":
            return unpacked(b[:, 8:], 4, 16), iq4_scales(b), _half(b, 0)
        case "MXFP4":
            return unpacked(b[:, 1:], 4, 16), fp4_scales(b).bfloat16()
    raise ValueError(f"{type_name} has no coding")


def _half(blocks: Tensor, start: int) -> Tensor:
    return blocks[:, start : start + 2].contiguous().view(torch.float16)
