"""Report of weights_on_gpu."""

from dataclasses import dataclass
from typing import Literal

from neo_desktop.app.bench.section import Section, Spread, Table

Way = Literal["divided", "streaming", "layer split"]


@dataclass(frozen=True, slots=True)
class WeightsCase:
    """One way at one share of GPU memory."""

    way: Way
    share: float  # of the layers' weights that fits GPU memory
    gpu_bytes: int  # weights in GPU memory, including embeddings and head
    host_bytes: int  # weights in host memory
    streamed_share: float  # share of host_bytes, for one row
    tokens_per_s: Spread  # one chat; a sample per token
    prompt_tokens_per_s: float
    bound_tokens_per_s: (
        float  # if the layers' weights in host memory took CPU and bus together no more than reading
    )
    bound_share: float  # tokens_per_s.median / bound_tokens_per_s


@dataclass(frozen=True, slots=True)
class Sides:
    """Rates of this computer's sides at one-row matmuls, each alone."""

    cpu_gb_per_s: float  # of weights
    bus_gb_per_s: float  # to the GPU
    gpu_gb_per_s: float  # of weights
    host_gb_per_s: float  # host memory's rate for CPU and bus together


@dataclass(frozen=True, slots=True)
class _Gains:
    """Gains at one share of memory."""

    share: float
    over_streaming: float | None
    over_layer_split: float | None
    of_bound: float


@dataclass(frozen=True, slots=True)
class WeightsReport:
    """Results; without a GPU without cases, and with the reason in `why_not`."""

    model: str
    device: str
    dtype: str
    layers_bytes: int  # the layers' weights
    prompt_tokens: int
    sides: Sides | None
    cases: tuple[WeightsCase, ...]
    notes: tuple[str, ...]
    why_not: str = ""

    def of(self, way: Way, share: float) -> WeightsCase | None:
        """Return a case; None if it was not measured."""
        return next((each for each in self.cases if each.way == way and each.share == share), None)

    @property
    def gains(self) -> list[_Gains]:
        """Gains of divided weights, by share."""
        found = []
        for case in self.cases:
            if case.way != "divided":
                continue
            streaming, layers = (self.of(way, case.share) for way in ("streaming", "layer split"))
            found.append(_Gains(case.share, _over(case, streaming), _over(case, layers), case.bound_share))
        return found

    def section(self) -> Section:
        if not self.cases:
            return Section("Weights in host memory", f"{self.why_not}: not measured.", notes=self.notes)
        table = Table.of(
            "",
            self.cases,
            {
                "layers on the GPU": "share:.0%",
                "way": "way",
                "on the GPU": "gpu_bytes:size",
                "in host memory": "host_bytes:size",
                "tokens/s": "tokens_per_s",
                "prompt, tokens/s": "prompt_tokens_per_s",
                "streamed": "streamed_share:.0%",
                "bound": "bound_tokens_per_s",
                "of bound": "bound_share:.0%",
            },
        )
        gains = Table.of(
            "What dividing each product brings",
            self.gains,
            {
                "layers on the GPU": "share:.0%",
                "over streaming": "over_streaming:.2f x",
                "over a layer split": "over_layer_split:.2f x",
                "of bound": "of_bound:.0%",
            },
            missing="not measured",
        )
        title = f"One chat with {self.model} in {self.dtype}, of which GPU memory holds a part"
        return Section(
            title,
            "Bound: what CPU and bus allow together, each measured alone with products of one row. "
            + ("" if self.sides is None else f"{self.sides}"),
            (gains, table),
            notes=self.notes,
        )


def _over(case: WeightsCase, other: WeightsCase | None) -> float | None:
    return None if other is None else case.tokens_per_s.median / other.tokens_per_s.median
