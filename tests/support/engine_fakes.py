"""Fakes of a model's parts, so scheduling is tested in milliseconds."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from neo_desktop.engine.batch import IterationPlan, IterationResult, SampledToken, ScheduledSequence
from neo_desktop.engine.detokenizer import IncrementalText
from neo_desktop.engine.execute.executor import Executor, Wait
from neo_desktop.engine.int_array import IntView
from neo_desktop.engine.kv.cache import KVCache
from neo_desktop.engine.kv_tier import KVTier
from neo_desktop.engine.request import Request
from neo_desktop.engine.sampling_params import SamplingParams
from neo_desktop.models.tokenizer import DecodeStream


class LetterStream(DecodeStream):
    """A stream with token 0 as "a", token 1 as "b", and so on."""

    def __init__(self) -> None:
        """Need no tokenizer."""

    def step(self, token_id: int) -> str:
        return chr(ord("a") + token_id % 26)

    def flush(self) -> str:
        return ""


def make_request(
    name: str,
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    arrival: int = 0,
    max_context_tokens: int = 10**6,
    eos_token_ids: tuple[int, ...] = (),
) -> Request:
    return Request(
        name,
        tuple(prompt),
        params,
        choice=0,
        seed=0,
        arrival=arrival,
        max_context_tokens=max_context_tokens,
        eos_token_ids=eos_token_ids,
        text=IncrementalText(LetterStream(), params.stop),
    )


def next_token(tokens: Sequence[int]) -> int:
    """Return the token of a "model" whose next token depends on all tokens before it."""
    return hash(tuple(tokens)) % 23


@dataclass
class FakeExecutor(Executor):
    """Executes plans on lists of tokens instead of tensors, and checks each plan.

    `slots[tier][slot]` is the token with its KV in that slot: attention reads the slots of the block table.
    A plan with a wrong block, or with copies in a wrong order, changes the output tokens.
    `states[stage, slot]` holds the tokens that a recurrent state has seen at a stage.
    """

    block_size: int
    max_batch_tokens: int
    slots: dict[KVTier, dict[int, int]] = field(default_factory=lambda: defaultdict(dict))
    # (stage, slot) -> the async decode at that stage, as of the last async step.
    standing: dict[tuple[int, int], ScheduledSequence] = field(default_factory=dict)
    num_turns: int = 0
    num_layers: int = 1
    states: dict[tuple[int, int], list[int]] = field(default_factory=dict)

    def start(self, plan: IterationPlan) -> Wait:
        return partial(self._carry_out, plan)

    def _carry_out(self, plan: IterationPlan) -> IterationResult:
        num_tokens = sum(sub_batch.num_tokens for sub_batch in plan.sub_batches)
        assert num_tokens <= self.max_batch_tokens
        assert num_tokens or plan.async_decodes
        for copy in plan.copies:
            for offset in range(self.block_size):
                source = copy.source_block * self.block_size + offset
                if source in self.slots[copy.source]:
                    target = copy.target_block * self.block_size + offset
                    self.slots[copy.target][target] = self.slots[copy.source][source]
        chosen: dict[str, list[SampledToken]] = {}
        ending = list(self._turn(plan))
        for sequence in (*plan.sequences, *ending):
            assert sequence.token_ids, "a request is scheduled to compute nothing"
            slots = self.slots[sequence.tier]

            def slot(position: int, table: IntView = sequence.block_table) -> int:
                return int(table[position // self.block_size]) * self.block_size + position % self.block_size

            for position, token_id in enumerate(sequence.token_ids, start=sequence.start):
                slots[slot(position)] = token_id
            if not any(sequence is each for each in ending):
                self._pass_states(sequence, range(self.num_layers + 1))
            if sequence.sampling is not None:
                context = [slots[slot(position)] for position in range(sequence.context_len)]
                chosen.setdefault(sequence.request_id, []).append(SampledToken(next_token(context)))
        return IterationResult(
            {name: first for name, (first, *_) in chosen.items()},
            {},
            after_drafts={name: tuple(more) for name, (_, *more) in chosen.items() if more},
        )

    def _pass_states(self, sequence: ScheduledSequence, stages: Sequence[int]) -> None:
        """Check that a sequence finds the states of its earlier tokens, and write those after its tokens."""
        if sequence.states is None:
            return
        slots, kv, size = sequence.states, self.slots[sequence.tier], self.block_size
        table = sequence.block_table
        before = [kv[int(table[at // size]) * size + at % size] for at in range(sequence.start)]
        for stage in stages:
            found = self.states[stage, slots.source] if slots.source >= 0 else []
            assert found == before, "a state has seen other tokens"
            if slots.checkpoint >= 0:
                seen = [*before, *sequence.token_ids[: slots.checkpoint_tokens]]
                self.states[stage, slots.checkpoint] = seen
            self.states[stage, slots.target] = [*before, *sequence.token_ids]

    def _turn(self, plan: IterationPlan) -> Iterator[ScheduledSequence]:
        """Check that every async decode advances by one stage; yield decodes that pass the last stage."""
        if not plan.async_decodes:
            return
        assert all(plan.async_decodes), "a turn without slots"
        self.num_turns += 1
        before, self.standing = self.standing, {}
        last = len(plan.async_decodes) - 1
        for stage, group in enumerate(plan.async_decodes):
            for slot, sequence in enumerate(group):
                if sequence is None:
                    continue
                self._pass_states(sequence, [stage])
                assert sequence.tier.host_attends
                if stage:
                    was = before[stage - 1, slot]
                    assert was[:4] == sequence[:4], "somebody else's hidden states are there"
                assert (sequence.sampling is not None) == (stage == last)
                if stage == last:
                    yield sequence
                else:
                    self.standing[stage, slot] = sequence

    def close(self) -> None:
        pass


def reference_output(request: Request, num_tokens: int) -> list[int]:
    """Return the fake model's output for a prompt on its own."""
    tokens = list(request.prompt_token_ids)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(request.prompt_token_ids) :]


def free_blocks(kv: KVCache) -> dict[KVTier, int]:
    return {tier: usage.num_blocks - usage.num_used_blocks for tier, usage in kv.usage().items()}
