"""Programs per multiprocessor agree with CUDA's occupancy calculator."""

import pytest

from neo_desktop.engine.kernels.occupancy import MULTIPROCESSORS, programs_per_sm, usual_programs


@pytest.mark.parametrize(
    ("capability", "registers", "shared", "num_warps", "expected"),
    [
        (75, 32, 0, 4, 8),  # 1,024 threads
        (75, 128, 2048, 4, 4),  # registers
        (75, 129, 2048, 4, 3),  # ... which are allocated 8 per thread at a time
        (75, 202, 20_480, 4, 2),
        (75, 32, 16_896, 4, 3),  # shared memory
        (75, 24, 0, 1, 16),
        (80, 64, 34_304, 4, 4),  # the system takes 1 KiB per program
        (80, 32, 0, 4, 16),
        (86, 64, 34_304, 4, 2),
        (86, 40, 0, 4, 12),  # 1,536 threads
        (89, 32, 1024, 1, 24),
        (90, 60, 34_304, 4, 6),
        (120, 60, 34_304, 4, 2),
        (86, 255, 0, 16, 0),  # 128 registers fit, 255 do not
    ],
)
def test_programs_of_a_kernel(
    capability: int, registers: int, shared: int, num_warps: int, expected: int
) -> None:
    assert programs_per_sm(capability, registers, shared, num_warps) == expected


def test_of_what_is_not_known_nothing_is_said() -> None:
    assert programs_per_sm(999, 32, 0, 4) is None
    assert usual_programs(999) > 0
    assert all(usual_programs(capability) > 0 for capability in MULTIPROCESSORS)
