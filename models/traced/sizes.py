"""Sizes of a `transformers` model that are known before it is loaded."""

from dataclasses import dataclass, field

from neo_desktop.models.experts_config import Gating


@dataclass(frozen=True, slots=True)
class FusedSizes:
    """Matrices with the same input, stacked by rows."""

    weights: tuple[str, ...]
    biases: tuple[str, ...]  # empty, or one per matrix
    rows: tuple[int, ...]  # per matrix
    columns: int
    label: str = ""  # its name; empty: named after the first matrix

    @property
    def name(self) -> str:
        """Name without the suffix `.weight`."""
        return self.label or self.weights[0].removesuffix(".weight")


@dataclass(frozen=True, slots=True)
class Mixed:
    """A layer's mixture of experts; some have no gates."""

    gate_up: str  # the parameter [experts, 2 * intermediate, hidden], or [experts, intermediate, hidden]
    down: str  # the parameter [experts, hidden, intermediate]
    count: int
    per_token: int
    matrices: tuple[FusedSizes, ...]  # by `kinds`, each with the experts' matrices stacked
    gating: Gating = "silu"

    @property
    def kinds(self) -> tuple[str, ...]:
        return ("gate", "up", "down")[3 - len(self.matrices) :]

    def named(self) -> dict[str, FusedSizes]:
        return dict(zip(self.kinds, self.matrices, strict=True))

    def kinds_of(self, parameter: str) -> tuple[str, ...]:
        """Return the kinds of matrices in a parameter, `gate_up` or `down`."""
        return self.kinds[-1:] if parameter == self.down else self.kinds[:-1]


@dataclass(frozen=True, slots=True)
class TracedSpec:
    """Parameters and attention of a model; independent of the dtype."""

    # name -> shape, of parameters outside the matrices
    parameters: dict[str, tuple[int, ...]] = field(hash=False)
    matrices: tuple[FusedSizes, ...]  # in the order of their use, without the head
    head: FusedSizes | None  # None: tied to the embedding
    embedding: str  # name of the embedding's parameter
    vocab_size: int
    hidden_size: int  # width of the head's input
    carried_width: int  # numbers per row that stages pass on, at most
    aliases: dict[str, str] = field(hash=False)  # another name of a parameter -> its name
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    windows: tuple[int | None, ...]
    softcap: float | None = None
    sinks: tuple[str, ...] = ()  # names of parameters, by layer; empty: no sinks
    states: tuple[tuple[int, ...], ...] = ()  # shapes of a request's recurrent states
    moe_layers: tuple[Mixed, ...] = ()
    wide: tuple[str, ...] = ()  # `parameters` that stay in float32
    unread: frozenset[str] = frozenset()  # tensors that text does not need, for example for images
    # RoPE changes its frequencies for longer prompts, but cached keys keep the old ones; None: no limit.
    most_tokens: int | None = None

    @property
    def all_matrices(self) -> tuple[FusedSizes, ...]:
        """Matrices of layers and experts, without the head."""
        return (*self.matrices, *(fused for moe in self.moe_layers for fused in moe.matrices))


NOTHING = TracedSpec({}, (), None, "", 0, 0, 0, {}, 0, 0, 0, 1.0, ())


@dataclass(frozen=True, slots=True)
class Description:
    """Properties of a model's text that its configuration has, but not its code."""

    context_tokens: int
    bos_token_ids: tuple[int, ...]
    eos_token_ids: tuple[int, ...]
