"""What the suite found, and how it is told."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from neo_desktop.app.bench.charts import BLACK, BLUE, GREEN, ORANGE, legend, tidy
from neo_desktop.app.bench.section import Metric, Plot, Section, Spread, Table
from neo_desktop.app.bench.words import say

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Way = Literal["divided", "streaming", "layer split"]
_STYLES: dict[Way, tuple[str, str]] = {
    "divided": (GREEN, "o"),
    "streaming": (BLUE, "s"),
    "layer split": (ORANGE, "^"),
}


@dataclass(frozen=True, slots=True)
class WeightsCase:
    """One way with so much GPU memory."""

    way: Way
    share: float  # of the layers' weights that GPU memory has room for
    gpu_bytes: int  # of weights in GPU memory, embeddings and head included
    host_bytes: int  # of weights in host memory
    streamed_share: float  # of these, for one row
    tokens_per_s: Spread  # of one chat; a sample per token
    prompt_tokens_per_s: float
    bound_tokens_per_s: (
        float  # if the layers' weights in host memory took CPU and bus together no more than reading
    )
    bound_share: float  # of the bound: tokens_per_s.median / bound_tokens_per_s


@dataclass(frozen=True, slots=True)
class Sides:
    """How fast the sides of this computer are at products of one row, by themselves."""

    cpu_gb_per_s: float  # of weights
    bus_gb_per_s: float  # to the GPU
    gpu_gb_per_s: float  # of weights
    host_gb_per_s: float  # what host memory gives to CPU and bus together


@dataclass(frozen=True, slots=True)
class _Gains:
    """At one share of memory."""

    share: float
    over_streaming: float | None
    over_layer_split: float | None
    of_bound: float


@dataclass(frozen=True, slots=True)
class WeightsReport:
    """What the suite found; without a GPU there are no cases, and `why_not` says so."""

    model: str
    device: str
    dtype: str
    layers_bytes: int  # the layers' weights
    prompt_tokens: int
    sides: Sides | None
    cases: tuple[WeightsCase, ...]
    notes: tuple[str, ...]
    why_not: str = ""
    suite: Literal["weights"] = "weights"

    def of(self, way: Way, share: float) -> WeightsCase | None:
        """Return a case; None: it was not measured."""
        return next((each for each in self.cases if each.way == way and each.share == share), None)

    @property
    def gains(self) -> list[_Gains]:
        """What divided weights bring, by share."""
        found = []
        for case in self.cases:
            if case.way != "divided":
                continue
            streaming, layers = (self.of(way, case.share) for way in ("streaming", "layer split"))
            found.append(_Gains(case.share, _over(case, streaming), _over(case, layers), case.bound_share))
        return found

    def metrics(self) -> tuple[Metric, ...]:
        """Tokens per second of each way, by share."""
        return tuple(
            Metric(
                f"weights.{case.share:.0%}.{case.way.replace(' ', '_')}.tokens_per_s",
                case.tokens_per_s.median,
                "tokens/s",
            )
            for case in self.cases
        )

    def section(self) -> Section:
        """A row per case, and a picture over the shares."""
        title, summary, *notes = say("weights", report=self)
        if not self.cases:
            return Section(title, summary, notes=(*notes, *self.notes))
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
        plot = Plot(
            "weights", "Tokens per second of one chat, by how much of the weights is on the GPU", self._draw
        )
        return Section(title, summary, (gains, table), (plot,), (*notes, *self.notes))

    def _draw(self, figure: "Figure") -> None:
        """A line per way, and the bound."""
        axes = figure.subplots()
        bounds = {100 * case.share: case.bound_tokens_per_s for case in self.cases}
        axes.plot(
            list(bounds),
            list(bounds.values()),
            "--",
            color=BLACK,
            linewidth=0.9,
            label="CPU and bus together",
        )
        for way, (colour, marker) in _STYLES.items():
            cases = _of_way(self.cases, way)
            x, y = [100 * case.share for case in cases], [case.tokens_per_s.median for case in cases]
            axes.plot(x, y, "-", color=colour, marker=marker, label=way)
        axes.set(xlabel="% of the layers' weights in GPU memory", ylabel="tokens per second", xlim=(0, 100))
        axes.set_ylim(bottom=0)
        tidy(axes)
        legend(figure, axes)


def _over(case: WeightsCase, other: WeightsCase | None) -> float | None:
    return None if other is None else case.tokens_per_s.median / other.tokens_per_s.median


def _of_way(cases: Sequence[WeightsCase], way: Way) -> list[WeightsCase]:
    return [case for case in cases if case.way == way]
