"""The contracts between scheduler and executor: a plan goes in, a result comes out, both frozen.

Types made for every request in every iteration are named tuples: immutable like frozen dataclasses, but
twice as fast to make.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from neo_desktop.engine.int_array import IntView
from neo_desktop.engine.kv_tier import KVTier
from neo_desktop.engine.sampling_params import SamplingParams
from neo_desktop.models.vision.prompt import ImageRows

FloatArray = NDArray[np.float32]

UNKNOWN_TOKEN = -1  # placeholder in a plan for a token that the previous, unfinished iteration will choose


def rounded_size(count: int, shift: int = 2, least: int = 1) -> int:
    """Round up to a multiple of `least`, and of the next power of two divided by `2 ** shift`.

    By default to 0, 1, 2, 3, 4, 6, 8, 12, 16 and so on.
    """
    step = max(least, 1 << max((count - 1).bit_length() - shift, 0))
    return -(-count // step) * step


class SamplingInput(NamedTuple):
    """Input of the sampler for one token."""

    params: SamplingParams
    seed: int  # with `choice` and `position`, determines the random number
    choice: int  # index among the n outputs of the prompt
    position: int  # index of the chosen token in prompt + output
    prompt_token_ids: IntView  # without duplicates; empty unless a penalty needs them
    output_token_ids: IntView  # in order; empty unless a penalty needs them
    allowed_tokens: Callable[[], bytes] | None = None  # see `GrammarState.allowed_tokens`; None: all


class DraftRow(NamedTuple):
    """A token of a draft, and the choice of the token after it."""

    token_id: int
    sampling: SamplingInput


class StateSlots(NamedTuple):
    """The slots of a request's recurrent states in one iteration; -1: none."""

    source: int  # before its tokens; -1: the empty state
    target: int  # after its tokens
    checkpoint: int = -1  # after its first `checkpoint_tokens` tokens
    checkpoint_tokens: int = 0
    drafts: tuple[int, ...] = ()  # after each token of its draft


class ScheduledSequence(NamedTuple):
    """One request's share of an iteration."""

    request_id: str
    token_ids: tuple[int, ...]  # tokens whose KV this iteration computes
    start: int  # position of the first token = number of tokens in the KV cache;
    tier: KVTier  # location of the KV
    block_table: IntView  # blocks in that tier, for all `context_len` tokens; immutable
    sampling: SamplingInput | None  # None: choose no token after the last of `token_ids`
    num_pooled: int = 0  # number of last tokens whose hidden states are requested, as a sum
    num_hidden: int = 0  # number of last tokens whose hidden states are requested, one by one
    states: StateSlots | None = None  # None: the model has no recurrent layers, or the states are not kept
    images: ImageRows | None = None  # of the request's prompt
    is_draft: bool = False  # its token is a draft: the request's row before it may choose another

    def with_token(self, token: "SampledToken | None") -> "ScheduledSequence":
        """Return the sequence with its last token, if that was unknown; None: the request failed."""
        if self.token_ids[-1] != UNKNOWN_TOKEN:
            return self
        return self._replace(token_ids=(*self.token_ids[:-1], 0 if token is None else token.token_id))

    @property
    def num_outputs(self) -> int:
        """Number of last tokens whose hidden states after the last layer are needed."""
        return max(self.num_pooled, self.num_hidden, int(self.sampling is not None))

    @property
    def position(self) -> int:
        """Position by which the first token is rotated."""
        return self.start if self.images is None else int(self.images.rotation(np.array(self.start)))

    @property
    def context_len(self) -> int:
        return self.start + len(self.token_ids)

    @property
    def is_decode(self) -> bool:
        """True if the decode kernel computes its attention: one new token."""
        return len(self.token_ids) == 1


@dataclass(frozen=True, slots=True)
class SubBatch:
    """Sequences that pass through the layers together."""

    sequences: tuple[ScheduledSequence, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(sequence.token_ids) for sequence in self.sequences)


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """A copy of one KV block, all layers, from one tier to another."""

    source: KVTier
    source_block: int
    target: KVTier
    target_block: int


class Contents(NamedTuple):
    """Parts of an iteration that often take longer than tables predict, in ms.

    A kind of work counts as all layers, each as long as the linear stage of one token.
    """

    launched: float = 0.0  # layers that no graph holds: those with prompts, moves or streamed KV
    prompts: float = 0.0
    moves: float = 0.0  # blocks, and KV of prompts, that move between device and host
    streamed: float = 0.0
    host: float = 0.0  # decodes outside the device
    attention: float = 0.0  # their attention and its copies, as predicted


NO_CONTENTS = Contents()


@dataclass(frozen=True, slots=True)
class IterationTiming:
    """Measured or predicted duration of an iteration."""

    total_ms: float
    host_attention_ms: float  # time in which the CPU computed decode attention, all layers
    is_first: bool = False  # first of its sizes: slower, because it compiled kernels or captured graphs;
    copies_ms: float = 0.0  # time in which streamed KV was copied to the device, all layers
    copy_wait_ms: float = 0.0  # part of `copies_ms` in which the device was idle
    copied_tokens: int = 0  # tokens whose KV was copied, per layer
    contents: Contents = NO_CONTENTS  # predicted
    excess_ms: float = 0.0  # part of the predicted total that tables do not contain


UNKNOWN = IterationTiming(0.0, 0.0)  # no prediction

# Async decodes at one linear stage of an iteration, by slot; None: an empty slot.
AsyncGroup = tuple[ScheduledSequence | None, ...]
MAX_ASYNC_DECODES = 16  # slots of a group


@dataclass(frozen=True, slots=True)
class IterationPlan:
    """The work of one iteration: block copies in order, then the sub-batches.

    A request with drafts has several rows in its sub-batch, one after the other: a decode, then a decode per
    draft at the next position (`is_draft`). All their KV is stored before a row attends.

    The copies of a layer finish before that layer is computed or stored; those of later layers may still
    run. Two sub-batches overlap (NEO, section 3.1): the GPU computes linear stages of one while the CPU
    computes the attention of the other. A single sub-batch overlaps only with its own attention.

    Async decodes have KV that the CPU or workers attend to. They advance by one layer in each async step, an
    iteration with `async_decodes`: their attention of a layer may take until the next async step. Each joins
    the rows of sub-batch 0 at one linear stage:

        stage 0        start: the embedding, then the part of layer 0 before its attention.
        stage l        from the attention of layer l - 1 to that of layer l.
        stage L        end: from the attention of the last of L layers to the sampled token.

    Each async step contains a decode in the same slot with the same token, one stage further than in the
    async step before. Ordinary iterations may run in between.
    """

    sub_batches: tuple[SubBatch, ...]  # one or two; with `async_decodes` the first may be empty
    copies: tuple[BlockCopy, ...] = ()
    predicted: IterationTiming = UNKNOWN
    is_ahead: bool = False  # made before the previous iteration ended: tokens may be unknown
    # By stage; all groups have the same number of slots, at most MAX_ASYNC_DECODES. Only decodes of the last
    # stage may have `sampling`. Empty: this iteration advances no async decode.
    async_decodes: tuple[AsyncGroup, ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= len(self.sub_batches) <= 2:
            raise ValueError(f"a plan must have one or two sub-batches, got {len(self.sub_batches)}")
        if len(set(map(len, self.async_decodes))) > 1:
            raise ValueError("all groups of `async_decodes` must have the same number of slots")

    @property
    def stays_on_device(self) -> bool:
        """True if the iteration has no host attention and no KV copies."""
        return not self.copies and not any(sequence.tier.in_host_memory for sequence in self.all_sequences)

    @property
    def sequences(self) -> Iterator[ScheduledSequence]:
        """The sequences of the sub-batches, those of sub-batch 0 first."""
        return (sequence for sub_batch in self.sub_batches for sequence in sub_batch.sequences)

    @property
    def async_sequences(self) -> Iterator[ScheduledSequence]:
        return (sequence for group in self.async_decodes for sequence in group if sequence is not None)

    @property
    def all_sequences(self) -> Iterator[ScheduledSequence]:
        return chain(self.sequences, self.async_sequences)


class TokenLogprob(NamedTuple):
    """A token and the natural logarithm of its probability under the model's unmodified logits."""

    token_id: int
    logprob: float


class SampledToken(NamedTuple):
    """The token chosen for one sequence."""

    token_id: int
    logprob: TokenLogprob | None = None  # None unless the request asked for log-probabilities
    top_logprobs: tuple[TokenLogprob, ...] = ()  # the most probable tokens, in descending order


@dataclass(frozen=True, slots=True)
class IterationResult:
    """Result of an iteration: `request_id -> token`, and `request_id -> error`."""

    sampled: Mapping[str, SampledToken]
    failed: Mapping[str, str]
    # request_id -> the tokens chosen after its drafts, in order, up to the first row that is not finite
    after_drafts: Mapping[str, tuple[SampledToken, ...]] = field(default_factory=dict)
    pooled: Mapping[str, FloatArray] = field(default_factory=dict)  # sums of hidden states, [hidden] each
    # request_id -> requested hidden states, [tokens, hidden], those after its drafts last
    hidden: Mapping[str, FloatArray] = field(default_factory=dict)
    timing: IterationTiming | None = None  # None: not measured


class DeviceMemoryError(MemoryError):
    """The device ran out of memory during an iteration; a smaller one may succeed."""
