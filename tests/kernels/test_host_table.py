"""A GPU looks rows up in tables in host memory: the numbers are the file's, and take no GPU memory."""

import pytest
import torch
from gguf_files import STORED, stored_rows

from neo_desktop.engine.cuda.pinned import weight_bytes
from neo_desktop.engine.kernels import dispatch
from neo_desktop.models.linear.host_table import HostTable, HostTables
from neo_desktop.models.linear.quantised import PartShape

pytestmark = pytest.mark.usefixtures("kernel_level")
ROWS, COLUMNS = 150, 512
CPU = torch.device("cpu")


def tables(device: torch.device) -> HostTables:
    def pageable(nbytes: int) -> torch.Tensor:
        return torch.full((nbytes,), 77, dtype=torch.uint8)

    return HostTables(weight_bytes if device.type == "cuda" else pageable, dispatch)


@pytest.mark.parametrize("numbers", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("type_name", [None, "Q8_0", "Q4_K", "Q6_K"])
def test_rows_are_looked_up(type_name: str | None, numbers: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(0)
    part = None if type_name is None else PartShape(type_name, ROWS)
    table = HostTable(part, ROWS, COLUMNS, torch.float16, device, tables(device))
    if type_name is None:
        expected = torch.randn(ROWS, COLUMNS).half()
        table.load(0, expected[:100])
        table.load(100, expected[100:].to(device))
    else:
        raw = stored_rows(type_name, ROWS, COLUMNS)
        for row in range(0, ROWS, 48):
            table.load_stored(row, raw[row : row + 48])
        expected = STORED[type_name].dequantised(raw)
    assert table.memory().keys() == {CPU}
    rows = torch.tensor([149, 0, 63, 64, 64, 127, 128] * 3, dtype=numbers, device=device)
    found = torch.full((len(rows), COLUMNS), torch.nan, dtype=torch.float16, device=device)
    table.look_up(rows, found)
    wanted = expected[rows.cpu()].half()
    assert torch.equal(found.cpu(), wanted)
    assert torch.equal(table.dense().cpu(), expected.half())
