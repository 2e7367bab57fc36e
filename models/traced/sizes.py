"""What a model of `transformers` consists of, as far as it is known before it is loaded."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class FusedSizes:
    """Matrices that multiply the same numbers, one below the other."""

    weights: tuple[str, ...]
    biases: tuple[str, ...]  # none, or one of each
    rows: tuple[int, ...]  # of each
    columns: int
    label: str = ""  # its name; none: that of the first matrix

    @property
    def name(self) -> str:
        """What it is called, without what stands for a weight."""
        return self.label or self.weights[0].removesuffix(".weight")


@dataclass(frozen=True, slots=True)
class Mixed:
    """A layer's mixture of experts."""

    gate_up: str  # the parameter [experts, 2 * intermediate, hidden]
    down: str  # the parameter [experts, hidden, intermediate]
    count: int
    per_token: int
    matrices: tuple[FusedSizes, ...]  # gate, up and down: of all experts, one below the other


@dataclass(frozen=True, slots=True)
class TracedSpec:
    """What a checkpoint holds, and what attention is like; nothing of it depends on a dtype."""

    # name -> shape, of those that are not matrices
    parameters: dict[str, tuple[int, ...]] = field(hash=False)
    matrices: tuple[FusedSizes, ...]  # in the order of their use, without the head
    head: FusedSizes | None  # None: it is the embeddings
    embedding: str  # whose rows the tokens look up
    vocab_size: int
    hidden_size: int  # that the head multiplies
    aliases: dict[str, str] = field(hash=False)  # another name of a parameter -> its name
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    windows: tuple[int | None, ...]
    softcap: float | None = None
    sinks: tuple[str, ...] = ()  # names of parameters, by layer; none: there are no sinks
    moe_layers: tuple[Mixed, ...] = ()
    wide: tuple[str, ...] = ()  # those of `parameters` that are kept in float32
    unread: frozenset[str] = frozenset()  # the model's tensors that text does not need, as those of images
    # For longer prompts a rotation has other frequencies, which cached keys do not follow; None: it has not.
    most_tokens: int | None = None

    @property
    def all_matrices(self) -> tuple[FusedSizes, ...]:
        """Those of experts, too, without the head."""
        return (*self.matrices, *(fused for each in self.moe_layers for fused in each.matrices))


NOTHING = TracedSpec({}, (), None, "", 0, 0, {}, 0, 0, 0, 1.0, ())


@dataclass(frozen=True, slots=True)
class Description:
    """What a configuration says of a model's text that its code does not show.

    Args:
        context_tokens: positions that the model has.
        bos_token_ids: none, or one.
        eos_token_ids: tokens after which it stops.
    """

    context_tokens: int
    bos_token_ids: tuple[int, ...]
    eos_token_ids: tuple[int, ...]
