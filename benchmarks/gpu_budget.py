"""Share of a card's instructions that quantised products need at full memory bandwidth, without a card.

    python -m benchmarks.gpu_budget

It counts what Triton compiled (tests/kernels/sass_budget.json): instructions per weight for a matrix of 4,096
columns, registers, spilled bytes and shared memory. A card issues a number of instructions while its
memory delivers a weight. Above 100 % instructions, and not memory, are the limit.
"~" marks code for 8.6, where the budget has none for the card.

This measures nothing: it knows neither latencies nor queues, nor units that are slower than the issue of
instructions. Exits with 1 if a limit is exceeded.
"""

import re
import sys
from collections.abc import Iterator
from typing import NamedTuple

from benchmarks.sass_budget import TRITON_OF_TORCH, read_budget
from neo_desktop.engine.simulation.presets import GPUS, GpuPreset
from neo_desktop.models.linear.grouped import packed_bytes

COLUMNS = 4096
ISSUED = 128  # instructions of threads per multiprocessor and clock: four warps
# Multiply-adds of 16-bit tensor cores per multiprocessor and clock, summed in float32; half the FLOP.
_DATA_CENTRE = {"t4": 512, "a100-80gb": 1024, "h100": 2048}
_GEFORCE = 256
CARDS = {
    "t4": 75,
    "rtx-3060": 86,
    "rtx-3090": 86,
    "rtx-4060": 89,
    "rtx-4090": 89,
    "rtx-5060-ti-16gb": 120,
    "rtx-5090": 120,
    "a100-80gb": 80,
    "h100": 90,
}
"""Names of cards -> compute capability, 86 for 8.6."""
LIMITS = {1: 0.6, 4: 0.8, 16: 1.0}
LIMIT_OF_DATA_CENTRE = {1: 0.9}  # A100 and H100
STANDS_IN = 86  # capability whose code stands for one that is not in the budget
TYPES = ("Q4_K", "Q4_0", "Q6_K", "Q8_0", "MXFP4")


class Count(NamedTuple):
    """Machine code of a product."""

    type_name: str
    rows: int  # of inputs
    capability: int
    instructions: float  # per weight
    registers: int
    spilled: int
    shared: int


def counts(version: str) -> Iterator[Count]:
    """Yield the products in the budget of a Triton version."""
    for name, figures in read_budget()[version].items():
        found = re.fullmatch(r"(\d+) rows? fp16, (\w+): _multiply_\w+ on sm_(\d+)", name)
        if found is not None:
            yield Count(
                found[2],
                int(found[1]),
                int(found[3]),
                figures["per_1000_weights"] / 1000,
                figures["registers"],
                figures["spilled"],
                figures["shared"],
            )


def instructions_per_s(gpu: GpuPreset) -> float:
    """Return the instructions of threads that a card issues per second, by the clock of its datasheet."""
    assert gpu.multiprocessors is not None
    return gpu.tensor_flops / 2 / _DATA_CENTRE.get(gpu.name, _GEFORCE) * ISSUED


def weight_bytes(type_name: str) -> float:
    return packed_bytes(type_name, 64, COLUMNS) / (64 * COLUMNS)


def share(count: Count, gpu: GpuPreset) -> float:
    """Return the instructions that a product needs at full bandwidth, as a share of what the card issues."""
    weights_per_s = gpu.memory_bytes_per_s / weight_bytes(count.type_name)
    return count.instructions * weights_per_s / instructions_per_s(gpu)


def limit(rows: int, card: str) -> float | None:
    limits = LIMIT_OF_DATA_CENTRE if card in ("a100-80gb", "h100") else LIMITS
    return limits.get(rows)


def shares(version: str) -> dict[tuple[str, int], dict[str, tuple[float, bool]]]:
    """Return types and rows -> cards -> the share, and True if the code is of the card's own capability."""
    found = {(count.type_name, count.rows, count.capability): count for count in counts(version)}
    shares: dict[tuple[str, int], dict[str, tuple[float, bool]]] = {}
    for type_name, rows in sorted({(name, rows) for name, rows, _ in found}):
        of_cards = shares.setdefault((type_name, rows), {})
        for card, capability in CARDS.items():
            own = found.get((type_name, rows, capability))
            count = own or found[type_name, rows, STANDS_IN]
            of_cards[card] = share(count, GPUS[card]), own is not None
    return shares


def exceeded(version: str) -> list[str]:
    """Return the shares above their limits."""
    return [
        f"{type_name}, rows: {rows}, {card}: {found:.0%}, allowed {allowed:.0%}"
        for (type_name, rows), of_cards in shares(version).items()
        for card, (found, _) in of_cards.items()
        if type_name in TYPES and (allowed := limit(rows, card)) is not None and found > allowed
    ]


def table(version: str) -> list[str]:
    """Return lines of Markdown: a type and number of rows each, with a column per card."""
    all_counts = list(counts(version))
    lines = [f"| type, rows | bits | instructions per weight | registers | {' | '.join(CARDS)} |"]
    lines.append("|---" * (4 + len(CARDS)) + "|")
    for (type_name, rows), of_cards in shares(version).items():
        same = [count for count in all_counts if (count.type_name, count.rows) == (type_name, rows)]
        each = [count.instructions for count in same]
        cells = [f"{'' if is_own else '~'}{found:.0%}" for found, is_own in of_cards.values()]
        lines.append(
            f"| {type_name}, {rows} | {8 * weight_bytes(type_name):.2f} | {min(each):.1f} to {max(each):.1f} "
            f"| {max(count.registers for count in same)} | {' | '.join(cells)} |"
        )
    return lines


def main() -> None:
    version = max(TRITON_OF_TORCH.values())
    print(f"Triton {version}; share of a card's instructions at full memory bandwidth\n")
    print("\n".join(table(version)))
    spilled = [count for count in counts(version) if count.spilled]
    print(f"\nspilled: {spilled or 'none'}; shared memory: at most", end=" ")
    print(max(count.shared for count in counts(version)), "bytes")
    complaints = exceeded(version)
    print("\nall limits are met" if not complaints else "\n" + "\n".join(complaints))
    sys.exit(1 if complaints else 0)


if __name__ == "__main__":
    main()
