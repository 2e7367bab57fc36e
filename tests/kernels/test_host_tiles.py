"""Rows of a CPU's quantised tiles as floats on a device: exactly the numbers of the CPU's matmul."""

import pytest
import torch
from gguf_files import STORED, stored_rows

from neo_desktop import native
from neo_desktop.engine.kernels import dispatch
from neo_desktop.models.linear.quantised import KERNEL_TYPES, Part, PartShape
from neo_desktop.models.linear.unpack import LAYOUTS

pytestmark = pytest.mark.usefixtures("kernel_level")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.sample(8)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("type_name", KERNEL_TYPES)
def test_the_numbers_are_those_of_the_cpu(type_name: str, dtype: torch.dtype, device: torch.device) -> None:
    assert LAYOUTS.keys() == set(KERNEL_TYPES)
    for rows, units in ((70, 3), (16, 1), (5, 2)):
        columns = STORED[type_name].elements * units
        part = Part(PartShape(type_name, rows), columns)
        part.load(0, stored_rows(type_name, rows, columns, rows))
        exact = torch.empty(rows, columns)
        native.unpack_quantised(type_name, part.packed, range(rows), exact)
        out = torch.full((rows + 1, columns), torch.nan, dtype=dtype, device=device)
        dispatch.unpack_quantised(type_name, part.packed.to(device), out[:rows])
        assert out[rows:].isnan().all()
        found, rounded = out[:rows].cpu(), exact.to(dtype)
        if dtype is torch.bfloat16:  # the interpreter truncates, a GPU rounds
            distance = (found.view(torch.int16).int() - rounded.view(torch.int16).int()).abs()
            assert distance.max() <= 1
        else:
            assert torch.equal(found, rounded)


def test_a_piece_may_begin_anywhere_in_a_matrix(device: torch.device) -> None:
    rows, columns = 80, 256
    part = Part(PartShape("Q4_K", rows), columns)
    part.load(0, stored_rows("Q4_K", rows, columns))
    exact = torch.empty(rows, columns)
    native.unpack_quantised("Q4_K", part.packed, range(rows), exact)
    staged = part.tiles_of(slice(32, 75)).to(device)
    out = torch.empty(43, columns, device=device)
    dispatch.unpack_quantised("Q4_K", staged, out)
    assert torch.equal(out.cpu(), exact[32:75])
