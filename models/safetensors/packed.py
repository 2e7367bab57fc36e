"""Matrices of 4- or 8-bit integers that AWQ, GPTQ and compressed-tensors pack into 32-bit words.

A word's lowest bits are its first number, except in AWQ, which permutes the numbers. With `in` columns,
`out` rows and 4 bits:

             numbers             a word spans      zeros                scales
    AWQ      [in, out / 8]       one column        [groups, out / 8]    [groups, out]
    GPTQ     [in / 8, out]       one row           [groups, out / 8]    [groups, out]
    compr.   [out, in / 8]       one row           [out / 8, groups]    [out, groups]
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from neo_desktop.models.gguf.types import PIECE_ELEMENTS
from neo_desktop.models.json_file import ModelError
from neo_desktop.models.safetensors.scheme import Layout, Packed
from neo_desktop.models.stored_tensor import FLOATS, Blocks, Rows, StoredTensor

# Positions in an AWQ word of its first number, its second …
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
_BLOCK = 32  # columns of GGUF's blocks
# Tensors of a module: numbers, scales, zeros, groups by column.
_OF_GPTQ = ("qweight", "scales", "qzeros", "g_idx")
_OF_COMPRESSED = ("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx")
NAMES = {Layout.AWQ: _OF_GPTQ, Layout.GPTQ: _OF_GPTQ, Layout.COMPRESSED: _OF_COMPRESSED}
# bits and symmetry -> the GGUF type that holds the numbers
_BLOCK_TYPES = {(4, True): "Q4_0", (4, False): "Q4_1", (8, True): "Q8_0"}


def packed_tensor(tensors: dict[str, StoredTensor], module: str, scheme: Packed) -> StoredTensor:
    """Return the matrix of a module; remove its tensors from `tensors`.

    Raises ModelError for tensors that are missing or do not fit together.
    """
    names = NAMES[scheme.layout]
    numbers, scales, zeros, groups = (tensors.pop(f"{module}.{kind}", None) for kind in names)
    assert numbers is not None  # the caller found the module by it
    needed = (True, True, not scheme.is_symmetric, scheme.is_reordered)
    for kind, tensor, is_needed in zip(names, (numbers, scales, zeros, groups), needed, strict=True):
        if tensor is None and is_needed:
            raise ModelError(f"{numbers.file.parent} lacks {module}.{kind}: complete the download.")
    assert scales is not None
    per_word = 32 // scheme.bits
    rows, columns = numbers.sides() if scheme.is_upright else numbers.sides()[::-1]
    if scheme.layout is Layout.AWQ:
        rows *= per_word
    else:
        columns *= per_word
    count = -(-columns // (scheme.group_size or columns))
    of_scales, of_zeros = (rows, count), (-(-rows // per_word), count)
    numbers.check([numbers.shape], ("I32",))
    scales.check([of_scales if scheme.is_upright else of_scales[::-1]], FLOATS)
    if zeros is not None:
        zeros.check([of_zeros if scheme.is_upright else of_zeros[::-1]], ("I32",))
    if groups is not None:
        groups.check([(columns,)], ("I32", "I64"))
    matrix = _Matrix(scheme, numbers, scales, zeros, groups, (rows, columns))
    return StoredTensor(
        f"{module}.weight",
        numbers.file,
        (rows, columns),
        scheme.type_name,
        sum(tensor.nbytes for tensor in (numbers, scales, zeros, groups) if tensor is not None),
        matrix.in_floats,
        matrix.blocks(),
        is_quantised=True,
    )


@dataclass(frozen=True, slots=True)
class _Matrix:
    """A packed matrix.

    Args:
        zeros: may be missing if they are all the same.
        groups: `[in]`, the group per column; None: groups are consecutive columns.
    """

    scheme: Packed
    numbers: StoredTensor
    scales: StoredTensor
    zeros: StoredTensor | None
    groups: StoredTensor | None
    shape: tuple[int, int]

    def blocks(self) -> Blocks | None:
        """Return GGUF's blocks; None if a group does not consist of whole blocks of consecutive columns, or
        scales need over 16 bits.

        Numbers and scales stay exact. Zeros become minima, -zero * scale, rounded to float16: the numbers of
        a group share an error of at most zero / 2048 of the scale.
        """
        scheme, columns = self.scheme, self.shape[1]
        if scheme.is_reordered or columns % _BLOCK or (scheme.group_size or _BLOCK) % _BLOCK:
            return None
        name = _BLOCK_TYPES.get((scheme.bits, scheme.is_symmetric))
        if name is None or self.scales.type_name == "F32":
            return None
        return Blocks(name, partial(self._in_blocks, name))

    def in_floats(self) -> Rows:
        groups = self._groups_of_columns()
        for first, numbers, zeros, scales in self._parts(8):
            both = [part if groups is None else part.index_select(1, groups) for part in (zeros, scales)]
            values = numbers.float().view(*both[0].shape, -1)
            values -= both[0][:, :, None]
            values *= both[1][:, :, None]
            yield first, values.flatten(1)

    def _in_blocks(self, type_name: str, rows: int) -> Rows:
        self._groups_of_columns()  # check only
        columns = self.shape[1]
        group_of_block = torch.arange(0, columns, _BLOCK) // (self.scheme.group_size or columns)
        for first, numbers, zeros, scales in self._parts(rows):
            header = scales[:, group_of_block, None].half()
            if type_name == "Q4_1":
                minima = zeros[:, group_of_block, None] * -header.float()
                header = torch.cat((header, minima.half()), 2)
            blocks = torch.unflatten(numbers, 1, (-1, _BLOCK))
            # 8-bit numbers become signed: minus 128.
            data = blocks ^ 128 if self.scheme.bits == 8 else blocks[:, :, :16] | (blocks[:, :, 16:] << 4)
            yield first, torch.cat((header.view(torch.uint8), data), 2).flatten(1)

    def _parts(self, unit: int) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
        """Yield the first row, numbers, zeros and scales of pieces; all but the last have a multiple of
        `unit` rows.

        Numbers are `[rows, in]` uint8, the others `[rows, groups]` float32.
        """
        rows, columns = self.shape
        scheme, per_word = self.scheme, 32 // self.scheme.bits
        numbers, scales = self._upright(self.numbers), self._upright(self.scales)
        stored_zeros = None if self.zeros is None else self._upright(self.zeros)
        step = max(PIECE_ELEMENTS // columns // unit, 1) * unit
        for first in range(0, rows, step):
            end = min(first + step, rows)
            words = slice(first // per_word, -(-end // per_word))
            if scheme.layout is Layout.AWQ:
                part = _along_columns(numbers[words], scheme)
            else:
                part = _along_rows(numbers[first:end], scheme)
            row_scales = scales[first:end]
            zeros = torch.tensor(2.0 ** (scheme.bits - 1)).expand(row_scales.shape)
            if stored_zeros is not None:
                zeros = self._zeros(_along_columns(stored_zeros[words], scheme)[: end - first], zeros)
            yield first, part, zeros, row_scales.float()

    def _upright(self, tensor: StoredTensor) -> Tensor:
        """Return a tensor with the matrix's rows first."""
        return tensor.read() if self.scheme.is_upright else tensor.read().T

    def _zeros(self, stored: Tensor, half: Tensor) -> Tensor:
        """Return the effective zeros, `[rows, groups]` float32.

        For a symmetric matrix they are known: programs store them, or one less, and not all say which.
        """
        if not self.scheme.is_symmetric:
            zeros = stored + self.scheme.stored_zero_offset
            return zeros.bitwise_and(2**self.scheme.bits - 1).float()
        if not ((stored == half) | (stored == half - 1)).all():
            assert self.zeros is not None
            raise ModelError(
                f"{self.zeros.name} in {self.zeros.file} has other zero points than the symmetric ones that "
                "config.json describes: use the config.json that belongs to these weights."
            )
        return half

    def _groups_of_columns(self) -> Tensor | None:
        """Return the group per column `[in]`; None: groups are equal runs of consecutive columns."""
        columns = self.shape[1]
        size = self.scheme.group_size or columns
        neighbours = torch.arange(columns) // size
        if self.groups is None:
            return neighbours if columns % size else None
        groups = self.groups.read().long()
        if not self.scheme.is_reordered and not torch.equal(groups, neighbours):
            raise ModelError(
                f"{self.groups.name} in {self.groups.file} orders columns differently than config.json "
                "describes: use the config.json that belongs to these weights."
            )
        count = -(-columns // size)
        if groups.min() < 0 or groups.max() >= count:
            raise ModelError(
                f"{self.groups.name} in {self.groups.file} names a group that is not one of the {count}: "
                "download the model again."
            )
        return groups if self.scheme.is_reordered or columns % size else None


def _along_rows(words: Tensor, scheme: Packed) -> Tensor:
    """Unpack words that span a row: `[n, m]` int32 -> `[n, m * 32 / bits]` uint8."""
    data = words.contiguous().view(torch.uint8)
    return data if scheme.bits == 8 else torch.stack((data & 15, data >> 4), 2).flatten(1)


def _along_columns(words: Tensor, scheme: Packed) -> Tensor:
    """Unpack words that span a column: `[n, m]` int32 -> `[n * 32 / bits, m]` uint8."""
    upright = words.contiguous()
    places = _AWQ_PLACES if scheme.layout is Layout.AWQ else range(32 // scheme.bits)
    numbers = torch.empty(len(upright), len(places), upright.shape[1], dtype=torch.uint8)
    shifted = torch.empty_like(upright)
    for index, place in enumerate(places):
        torch.bitwise_right_shift(upright, scheme.bits * place, out=shifted)
        numbers[:, index] = shifted.bitwise_and_(2**scheme.bits - 1)
    return numbers.flatten(0, 1)
