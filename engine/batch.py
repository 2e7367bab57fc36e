"""The contracts between scheduler and executor: a plan goes in, a result comes out, both frozen.

What is made anew for every request in every iteration is a named tuple: no less frozen than a dataclass, and
made in less than half of the time.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from neo_desktop.engine.grammar import GrammarState
from neo_desktop.engine.int_array import IntView
from neo_desktop.engine.kv_tier import KVTier
from neo_desktop.engine.sampling_params import SamplingParams

FloatArray = NDArray[np.float32]

UNKNOWN_TOKEN = -1  # in a plan: the token that the iteration before chooses, which has not ended


class SamplingInput(NamedTuple):
    """All that the sampler needs to choose one token."""

    params: SamplingParams
    seed: int  # with `choice` and `position`, fixes the random number
    choice: int  # which of the n outputs of the prompt
    position: int  # index of the chosen token in prompt + output
    prompt_token_ids: IntView  # each of them once; empty unless a penalty needs them
    output_token_ids: IntView  # in order; empty unless a penalty needs them
    grammar: GrammarState | None = None  # says which tokens may come; None: all


class ScheduledSequence(NamedTuple):
    """One request's share of an iteration."""

    request_id: str
    token_ids: tuple[int, ...]  # the tokens whose KV this iteration computes
    start: int  # position of the first of them = tokens already in the KV cache
    tier: KVTier  # where the KV lives
    block_table: IntView  # blocks of that tier, covering all `context_len` tokens; fixed, as all of a plan
    sampling: SamplingInput | None  # None: no token is to be chosen after the last one of `token_ids`
    num_pooled: int = 0  # how many of the last ones' hidden states are asked for, as their sum

    def with_token(self, token: "SampledToken | None") -> "ScheduledSequence":
        """Return it with this last token in place of one that was unknown; None: it has failed meanwhile."""
        if self.token_ids[-1] != UNKNOWN_TOKEN:
            return self
        return self._replace(token_ids=(*self.token_ids[:-1], 0 if token is None else token.token_id))

    @property
    def context_len(self) -> int:
        """Tokens in the KV cache once this iteration is done."""
        return self.start + len(self.token_ids)

    @property
    def is_decode(self) -> bool:
        """Whether the decode kernel computes its attention: one new token."""
        return len(self.token_ids) == 1


@dataclass(frozen=True, slots=True)
class SubBatch:
    """Sequences that pass through the layers together."""

    sequences: tuple[ScheduledSequence, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens in the linear stages of this sub-batch."""
        return sum(len(sequence.token_ids) for sequence in self.sequences)


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """One KV block, all layers, to be copied from one tier to another."""

    source: KVTier
    source_block: int
    target: KVTier
    target_block: int


@dataclass(frozen=True, slots=True)
class IterationTiming:
    """How long an iteration took, or is predicted to take."""

    total_ms: float
    host_attention_ms: float  # while the CPU computed decode attention, all layers; 0 where there was none
    is_first: bool = False  # of its sizes: it took longer, since kernels were compiled or graphs captured
    copies_ms: float = 0.0  # while swapped KV came to the device, all layers; 0 where there was none
    copy_wait_ms: float = 0.0  # of it, while the device had nothing else to do
    copied_tokens: int = 0  # whose KV came, in each layer


UNKNOWN = IterationTiming(0.0, 0.0)  # nobody predicts anything

# Decodes that stand at one stage of an iteration, by slot; None: an empty one.
AsyncGroup = tuple[ScheduledSequence | None, ...]
MAX_ASYNC_DECODES = 16  # slots of a group


@dataclass(frozen=True, slots=True)
class IterationPlan:
    """What one iteration does: the copies, in order, then the sub-batches.

    A layer of the copies is done before anything of that layer is computed or stored; later layers may still
    be on their way. Two sub-batches overlap (NEO, section 3.1: one computes linear stages on the GPU while
    the CPU computes the attention of the other). With one, its own attention overlaps at most.

    async decodes, whose KV the CPU or workers attend to, take one layer in each iteration that has any, a
    turn: their attention of a layer may take until the next turn. Each stands at a linear stage of sub-batch
    0, whose rows it joins:

        stage 0        begins: the embedding, then what precedes the attention of layer 0
        stage l        what lies between the attention of layer l - 1 and that of layer l
        stage L        ends: what follows the attention of the last of L layers, and its token

    In each turn a decode is given with the same token, in the slot that it began with, one stage further than
    in the turn before. Iterations that are no turns may lie between.
    """

    sub_batches: tuple[SubBatch, ...]  # one or two; with `async_decodes` the first may be empty
    copies: tuple[BlockCopy, ...] = ()
    predicted: IterationTiming = UNKNOWN
    is_ahead: bool = False  # whether it starts before the iteration before has ended
    # By stage; all groups have the same number of slots, at most MAX_ASYNC_DECODES. Only decodes of the last
    # stage may have `sampling`. Empty: this iteration advances no async decode.
    async_decodes: tuple[AsyncGroup, ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= len(self.sub_batches) <= 2:
            raise ValueError(f"a plan has one or two sub-batches, got {len(self.sub_batches)}")
        if len(set(map(len, self.async_decodes))) > 1:
            raise ValueError("the async_groups of a plan have the same number of slots")

    @property
    def stays_on_device(self) -> bool:
        """Whether the host neither attends nor brings KV anywhere in it."""
        return not self.copies and all(sequence.tier.stays_on_device for sequence in self.all_sequences)

    @property
    def sequences(self) -> Iterator[ScheduledSequence]:
        """The sequences of the sub-batches, those of sub-batch 0 first."""
        return (sequence for sub_batch in self.sub_batches for sequence in sub_batch.sequences)

    @property
    def async_sequences(self) -> Iterator[ScheduledSequence]:
        """The async decodes, by stage."""
        return (sequence for group in self.async_decodes for sequence in group if sequence is not None)

    @property
    def all_sequences(self) -> Iterator[ScheduledSequence]:
        """All sequences, the async ones last."""
        return chain(self.sequences, self.async_sequences)


class TokenLogprob(NamedTuple):
    """A token and the natural logarithm of its probability under the model's unmodified logits."""

    token_id: int
    logprob: float


class SampledToken(NamedTuple):
    """The token chosen for one sequence."""

    token_id: int
    logprob: TokenLogprob | None = None  # None unless the request asked for log-probabilities
    top_logprobs: tuple[TokenLogprob, ...] = ()  # the most probable tokens, in falling order


@dataclass(frozen=True, slots=True)
class IterationResult:
    """What an iteration brought: `request_id -> its token`, and `request_id -> why it has none`."""

    sampled: Mapping[str, SampledToken]
    failed: Mapping[str, str]
    pooled: Mapping[str, FloatArray] = field(default_factory=dict)  # sums of hidden states, [hidden] each
    timing: IterationTiming | None = None  # None: not measured


class DeviceMemoryError(MemoryError):
    """The device had no memory left in the middle of an iteration; it can be tried again, smaller."""
