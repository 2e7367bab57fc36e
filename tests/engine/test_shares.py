"""The division of offloaded matrices between bus and CPU is the fastest measured one."""

import pytest

from neo_desktop.engine.profiling.iteration_timer import measured_shares
from neo_desktop.models.linear.shares import StreamedShares


class Machine:
    """A CPU that reads and multiplies, and a bus beside it."""

    def __init__(self, cpu_ms: float, cpu_row_ms: float, bus_ms: float) -> None:
        self.cpu_ms, self.cpu_row_ms, self.bus_ms = cpu_ms, cpu_row_ms, bus_ms
        self.asked: list[int] = []

    def offloaded_linear_ms(self, tokens: int, shares: StreamedShares) -> float:
        """Return the time of the slower side."""
        share = shares.of(tokens)
        self.asked.append(tokens)
        return max((1 - share) * max(self.cpu_ms, tokens * self.cpu_row_ms), share * self.bus_ms)

    def least_ms(self, tokens: int) -> float:
        cpu_ms = max(self.cpu_ms, tokens * self.cpu_row_ms)
        return cpu_ms * self.bus_ms / (cpu_ms + self.bus_ms)


@pytest.mark.parametrize(
    "machine", [Machine(4, 0.3, 16), Machine(2, 0.01, 2), Machine(8, 8, 1), Machine(1, 0.001, 500)]
)
def test_bus_and_cpu_end_together(machine: Machine) -> None:
    shares = measured_shares(machine.offloaded_linear_ms, 2048, seconds=60)
    for rows in shares.rows:
        assert machine.offloaded_linear_ms(rows, shares) <= 1.3 * machine.least_ms(rows)
    assert list(shares.shares) == sorted(shares.shares)


def test_a_slow_cpu_gets_nothing_of_prompts_and_is_not_waited_for() -> None:
    machine = Machine(4, 0.5, 16)
    shares = measured_shares(machine.offloaded_linear_ms, 2048, seconds=60)
    assert shares.of(2048) == 1.0
    assert shares.of(1) == pytest.approx(0.2, abs=0.05)
    assert max(machine.asked) <= 256


def test_without_time_more_rows_are_streamed() -> None:
    shares = measured_shares(Machine(4, 0.01, 16).offloaded_linear_ms, 512, seconds=0.0)
    assert shares.of(1) < 0.5
    assert shares.of(512) == 1.0
