"""Tiles of a CPU become a GPU's layout, bit by bit as from the file."""

import pytest
import torch
from gguf_files import small_rows

from neo_desktop.models.linear.grouped import Grouped
from neo_desktop.models.linear.quantised import KERNEL_TYPES, Part, PartShape
from neo_desktop.models.linear.unpack import LAYOUTS, regroup

CPU = torch.device("cpu")
COLUMNS = 512


@pytest.mark.parametrize("type_name", LAYOUTS)
def test_tiles_become_what_a_gpu_loads_from_the_file(type_name: str) -> None:
    """The third and fourth tile of 64 rows move to the second and third; the others stay as they are."""
    assert type_name in KERNEL_TYPES
    raw = small_rows(type_name, 256, COLUMNS, seed=3)
    on_host = Part(PartShape(type_name, 256), COLUMNS)
    on_host.load(0, raw)
    other = small_rows(type_name, 256, COLUMNS, seed=4)
    moved, expected = (Grouped(type_name, 256, COLUMNS, CPU) for _ in range(2))
    moved.load(0, other)
    regroup(on_host.tiles_of(slice(128, 256)), moved, 64)
    expected.load(0, torch.cat((other[:64], raw[128:], other[192:])))
    for found, wanted in zip(moved.tensors(), expected.tensors(), strict=True):
        assert torch.equal(found, wanted)
