"""Published speeds of one chat (`world.json`) beside this project's cost model.

    python -m benchmarks.world check            errors of the stored shares, and rows that are not modelled
    python -m benchmarks.world fit              fit the shares of engine/simulation/shares.py again
    python -m benchmarks.world_tables rows      each row beside predictions; cards: the best-known models

A token's time is what it reads, by bandwidth and share, and a time per layer. This is the simulator's model
without its overlap, since llama.cpp's card and CPU work in turn. One card and one model are a series. The
shares are fitted on every second series and checked on the others. This project measured nothing here.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log
from statistics import median

from benchmarks.world_rows import Reads, Row, load, reads
from neo_desktop.engine.simulation import shares

WITHIN = 0.35
OTHER = "ik_llama.cpp"  # its kernels are not llama.cpp's
_OUTLIER = 0.3  # errors beyond count less: some published figures are wrong
_OUTLIER_WEIGHT = 0.3
_PRIOR = 0.05  # weight of the first guess, for shares that few rows determine
_LIMITS = (0.05, 0.95)
_STEPS = (0.4, 0.2, 0.1, 0.05, 0.02, 0.01)

Parameters = Mapping[tuple[str, str], float]


def generation(row: Row) -> str:
    """Return the row's card family; cards of data centres are fitted by name."""
    assert row.gpu is not None
    return shares.generation(row.gpu.name) or row.gpu.name


def stored() -> dict[tuple[str, str], float]:
    """Return the tables of engine/simulation/shares.py."""
    found = {
        (name, key): value
        for table in (shares.CARDS, shares.HOSTS)
        for name, each in table.items()
        for key, value in each._asdict().items()
    }
    times = {"mixture_us": shares.MIXTURE_US, "recurrent_us": shares.RECURRENT_US}
    times |= {"host_layer_us": shares.HOST_LAYER_US, "token_us": shares.TOKEN_US}
    return found | {("all", key): value for key, value in times.items()}


@dataclass(frozen=True)
class Case:
    """A row that can be modelled."""

    row: Row
    reads: Reads

    @property
    def series(self) -> tuple[bool, str, str]:
        return self.reads.host_layers > 0, str(self.row["card"]), self.row["model"]

    def seconds(self, found: Parameters) -> float:
        """Predict the time of one token."""
        us, reads, total = 1e-6, self.reads, found["all", "token_us"] * 1e-6
        if self.row.gpu is not None:
            name, rate = generation(self.row), self.row.gpu.memory_bytes_per_s
            total += reads.card / (found[name, "streaming"] * rate)
            total += reads.card_kv / (found[name, "attention"] * rate)
            total += reads.card_layers * found[name, "layer_us"] * us
            total += reads.card_mixtures * found["all", "mixture_us"] * us
            total += reads.card_recurrent * found["all", "recurrent_us"] * us
        if reads.host_layers:
            name, rate = self.row.host_kind, self.row.host.memory_bytes_per_s
            total += reads.host / (found[name, "weights"] * rate)
            total += reads.host_experts / (found[name, "experts"] * rate)
            total += reads.host_kv / (found[name, "attention"] * rate)
            total += reads.host_layers * found["all", "host_layer_us"] * us
        return total

    @property
    def counts(self) -> bool:
        """False if the program or the host's memory is another than the shares are for."""
        host = self.row.host_is_known or not self.reads.host_layers
        return host and self.row["program"] != OTHER

    def error(self, found: Parameters) -> float:
        """Return predicted / published speed - 1."""
        return 1 / (self.seconds(found) * float(self.row["tps"])) - 1


def cases() -> list[Case]:
    return [Case(row, reads(row)) for row in load() if not row["skip"]]


def halves(all_cases: Sequence[Case]) -> tuple[list[Case], list[Case]]:
    """Return the cases of every second series, to fit, and the others, to check."""
    counted = [case for case in all_cases if case.counts]
    fitted = set(sorted({case.series for case in counted})[::2])
    first = [case for case in counted if case.series in fitted]
    return first, [case for case in counted if case.series not in fitted]


def _loss(found: Parameters, guess: Parameters, fitted: Sequence[Case]) -> float:
    total = 0.0
    for case in fitted:
        error = abs(log(case.seconds(found) * case.row["tps"]))
        total += min(error, _OUTLIER) + _OUTLIER_WEIGHT * max(error - _OUTLIER, 0.0)
    prior = sum(log(found[key] / guess[key]) ** 2 for key in found)
    return total / len(fitted) + _PRIOR * prior / len(found)


def fit(all_cases: Sequence[Case]) -> dict[tuple[str, str], float]:
    """Return the parameters with the smallest absolute errors, found coordinate by coordinate."""
    fitted, _ = halves(all_cases)
    guess: dict[tuple[str, str], float] = {}
    for case in all_cases:
        if case.row.gpu is not None:
            first = {"streaming": 0.8, "attention": 0.6, "layer_us": 40.0}
            guess |= {(generation(case.row), key): value for key, value in first.items()}
        if case.reads.host_layers:
            first = {"weights": 0.6, "experts": 0.4, "attention": 0.2}
            guess |= {(case.row.host_kind, key): value for key, value in first.items()}
    times = {"mixture_us": 30.0, "recurrent_us": 10.0, "host_layer_us": 50.0, "token_us": 300.0}
    guess |= {("all", key): value for key, value in times.items()}
    found, best = dict(guess), _loss(guess, guess, fitted)
    for step in _STEPS:
        improves = True
        while improves:
            improves = False
            for key, old in list(found.items()):
                for factor in (1 + step, 1 / (1 + step)):
                    value = old * factor
                    if not _is_time(key):
                        value = min(max(value, _LIMITS[0]), _LIMITS[1])
                    loss = _loss(found | {key: value}, guess, fitted)
                    if loss < best - 1e-7:
                        found[key], best, improves = value, loss, True
    return {key: round(value, 0 if _is_time(key) else 2) for key, value in found.items()}


def _is_time(key: tuple[str, str]) -> bool:
    return key[1].endswith("_us")


def errors(some: Sequence[Case], found: Parameters) -> str:
    """Describe the errors of some cases."""
    each = [abs(case.error(found)) for case in some]
    within = sum(error <= WITHIN for error in each) / len(each)
    return f"{len(each)} rows, median error {median(each):.1%}, {within:.1%} within {WITHIN:.0%}"


def check(all_cases: Sequence[Case], found: Parameters) -> None:
    fitted, checked = halves(all_cases)
    print(f"fitted: {errors(fitted, found)}")
    print(f"checked: {errors(checked, found)}")
    for title, partly in (("wholly on the card", False), ("partly or wholly on the CPU", True)):
        print(f"  {title}: {errors([c for c in checked if c.series[0] == partly], found)}")
    others = [case for case in all_cases if not case.counts]
    print(f"not counted, since the host's memory is not given, or by {OTHER}: {errors(others, found)}")
    print(f"\nBeyond {WITHIN:.0%}:")
    for case in all_cases:
        if abs(error := case.error(found)) > WITHIN:
            half = "fitted" if case in fitted else "checked" if case in checked else "not counted"
            print(f"  {case.row.title}: {case.row['tps']:g} published, {error:+.0%} ({half})")
    print("\nNot modelled:")
    for row in load():
        if row["skip"]:
            print(f"  {row.title}: {row['tps']:g}; {row['skip']}")


def show(found: Parameters) -> None:
    names = dict.fromkeys(name for name, _ in found)
    for name in names:
        print(name, {key: value for (each, key), value in found.items() if each == name})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=("check", "fit"))
    part, all_cases = parser.parse_args().part, cases()
    found = fit(all_cases) if part == "fit" else stored()
    if part == "fit":
        show(found)
    check(all_cases, found)


if __name__ == "__main__":
    main()
