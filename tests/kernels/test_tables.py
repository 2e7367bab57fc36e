"""Tables in host memory: looked-up rows are the file's numbers, and device memory has none of them."""

from dataclasses import replace

import pytest
import torch
from gguf_files import STORED, stored_rows

from neo_desktop.engine.cuda.pinned import mapped_bytes
from neo_desktop.engine.kernels import dispatch
from neo_desktop.models.linear.dense import DENSE
from neo_desktop.models.linear.protocol import Embedding
from neo_desktop.models.linear.quantised import PartShape
from neo_desktop.models.linear.quantised_gpu import QuantisedOnGPU
from neo_desktop.models.stored_form import StoredForm

pytestmark = pytest.mark.usefixtures("kernel_level")
ROWS, COLUMNS = 150, 512
CPU = torch.device("cpu")


def in_host_memory(nbytes: int) -> torch.Tensor:
    return torch.full((nbytes,), 77, dtype=torch.uint8)


@pytest.mark.parametrize("numbers", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("type_name", [None, "Q8_0", "Q4_K", "Q6_K"])
def test_rows_are_looked_up(type_name: str | None, numbers: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(0)
    room = mapped_bytes if device.type == "cuda" else in_host_memory
    stored = {} if type_name is None else {"embedding": (PartShape(type_name, ROWS),)}
    form = StoredForm(stored=stored).on_gpu(dispatch, room).named("embedding")
    table = form.table(ROWS, COLUMNS, torch.float16, device)
    assert isinstance(table, Embedding)
    if type_name is None:
        expected = torch.randn(ROWS, COLUMNS).half()
        table.load(0, expected[:100])
        table.load(100, expected[100:].to(device))
    else:
        raw = stored_rows(type_name, ROWS, COLUMNS)
        assert isinstance(table, QuantisedOnGPU)
        for row in range(0, ROWS, 48):
            table.load_stored(row, raw[row : row + 48])
        expected = STORED[type_name].dequantised(raw)
    assert table.memory().keys() == {CPU}
    rows = torch.tensor([149, 0, 63, 64, 64, 127, 128] * 3, dtype=numbers, device=device)
    found = torch.full((len(rows), COLUMNS), torch.nan, dtype=torch.float16, device=device)
    table.look_up(rows, found)
    assert torch.equal(found.cpu(), expected[rows.cpu()].half())


def test_without_tables_in_host_memory_they_are_on_the_device(device: torch.device) -> None:
    table = replace(DENSE, uses_tiles=False).table(ROWS, COLUMNS, torch.float16, device)
    assert table.memory().keys() == {device}
