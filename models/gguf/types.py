"""The dtypes and quantisation types of GGUF files."""

from dataclasses import dataclass

import torch
from torch import Tensor

from neo_desktop import native

# Elements to dequantise at once: intermediate results should stay in the processor's caches.
PIECE_ELEMENTS = 2**20


@dataclass(frozen=True, slots=True)
class StoredType:
    """A quantisation type or dtype."""

    name: str
    elements: int  # per block
    nbytes: int  # per block
    dtype: torch.dtype | None = None  # that represents the numbers exactly; None: quantised

    def dequantised(self, raw: Tensor) -> Tensor:
        """Return rows of bytes `[rows, row_bytes]` as float32 `[rows, columns]`, contiguous."""
        if self.dtype is not None:
            return raw.contiguous().view(self.dtype).float()
        rows, columns = len(raw), raw.shape[1] // self.nbytes * self.elements
        packed = torch.zeros(native.packed_bytes(self.name, rows, columns), dtype=torch.uint8)
        native.pack_quantised(self.name, raw.contiguous(), 0, packed)
        numbers = torch.empty(rows, columns)
        native.unpack_quantised(self.name, packed, range(rows), numbers)
        return numbers


TYPES = {
    0: StoredType("F32", 1, 4, torch.float32),
    1: StoredType("F16", 1, 2, torch.float16),
    30: StoredType("BF16", 1, 2, torch.bfloat16),
    8: StoredType("Q8_0", 32, 34),
    2: StoredType("Q4_0", 32, 18),
    3: StoredType("Q4_1", 32, 20),
    6: StoredType("Q5_0", 32, 22),
    7: StoredType("Q5_1", 32, 24),
    10: StoredType("Q2_K", 256, 84),
    11: StoredType("Q3_K", 256, 110),
    12: StoredType("Q4_K", 256, 144),
    13: StoredType("Q5_K", 256, 176),
    14: StoredType("Q6_K", 256, 210),
    20: StoredType("IQ4_NL", 32, 18),
    23: StoredType("IQ4_XS", 256, 136),
    39: StoredType("MXFP4", 32, 17),
}
"""Keys are the type numbers in files."""
BY_NAME = {stored.name: stored for stored in TYPES.values()}
