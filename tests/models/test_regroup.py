"""Tiles of a CPU become a GPU's layout, with the file's numbers."""

import pytest
import torch
from gguf_files import STORED, small_rows

from neo_desktop.models.linear.grouped import Grouped, dequantise
from neo_desktop.models.linear.quantised import KERNEL_TYPES, Part, PartShape
from neo_desktop.models.linear.unpack import LAYOUTS, load_stored, regroup

CPU = torch.device("cpu")
COLUMNS = 512


@pytest.mark.parametrize("type_name", LAYOUTS)
def test_tiles_become_the_same_numbers_on_a_gpu(type_name: str) -> None:
    """The third and fourth tile of 64 rows move to the second and third; the others stay as they are."""
    assert type_name in KERNEL_TYPES
    raw, other = (small_rows(type_name, 256, COLUMNS, seed=seed) for seed in (3, 4))
    on_host = Part(PartShape(type_name, 256), COLUMNS)
    on_host.load(0, raw)
    moved = Grouped(type_name, 256, COLUMNS, CPU)
    load_stored(moved, 0, other)
    regroup(on_host.tiles_of(slice(128, 256)), moved, slice(64, 192))
    found = torch.empty(256, COLUMNS)
    dequantise(moved, 0, found)
    assert torch.equal(found, STORED[type_name].dequantised(torch.cat((other[:64], raw[128:], other[192:]))))
