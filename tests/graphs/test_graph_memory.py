"""The memory of graphs and of their buckets."""

import pytest
import torch
from fallback_levels import Levels
from graph_case import TOKENS, contexts, decodes, make_executor, prompts
from hypothesis import given
from hypothesis import strategies as st
from pipeline_case import (
    check_result,
    reference_logprobs,
    tiny_config,
    tiny_model,
)

from neo_desktop.engine.batch import (
    MAX_ASYNC_DECODES,
    IterationPlan,
    ScheduledSequence,
    SubBatch,
)
from neo_desktop.engine.execute.async_decodes import AsyncBuffers
from neo_desktop.engine.execute.layout import BatchMembers, Capacity, GraphKey
from neo_desktop.engine.execute.workspace import Workspace, device_bytes
from neo_desktop.engine.int_array import IntArray
from neo_desktop.engine.kernels import dispatch, in_torch
from neo_desktop.engine.kv.storage import KVPool, KVStorage
from neo_desktop.engine.kv_tier import MEASURED_TIERS, KVTier
from neo_desktop.models.decoder import Decoder
from neo_desktop.models.linear.dense import Dense
from neo_desktop.models.stages import Stages

BLOCK_SIZE = 16
PLAIN = Dense(uses_tiles=False)  # the weight layout of a GPU

pytestmark = pytest.mark.usefixtures("kernels")


@pytest.fixture(scope="module")
def model() -> Decoder:
    """A model of two layers, one with a sliding window."""
    return tiny_model((None, 5), form=PLAIN, attention_sinks=True, softcap=0.5)


def test_an_iteration_that_is_too_large_takes_memory_of_its_own(model: Decoder) -> None:
    executor, backend = make_executor(model, capacity=Capacity(tokens=16, decodes=4, blocks=1))
    executor.execute(prompts("abcde"))
    for _ in range(2):
        (one,) = decodes("a").sub_batches[0].sequences
        plan = IterationPlan((SubBatch(tuple(one._replace(request_id=f"a{i}") for i in range(20))),))
        result = executor.execute(plan)
        best = int(reference_logprobs(model, TOKENS["a"][: one.context_len]).argmax())
        assert {token.token_id for token in result.sampled.values()} == {best}
        assert not backend.was_graph
    executor.close()


def test_attention_in_too_many_pieces_is_not_kept_in_graphs(
    model: Decoder, levels: Levels, monkeypatch: pytest.MonkeyPatch
) -> None:
    levels(paged_decode="torch")
    executor, backend = make_executor(model)
    executor.execute(prompts("ab"))
    monkeypatch.setattr(in_torch, "PIECE_BYTES", 1)  # one token per piece; a table holds 1024
    for most, is_graph in ((1023, False), (1024, True)):
        monkeypatch.setattr(dispatch, "MAX_PIECES_IN_GRAPH", most)
        for step in range(2):
            plan = decodes("ab", step=step)
            check_result(model, plan, contexts(plan), executor.execute(plan))
        assert backend.was_graph == is_graph
    executor.close()


@given(
    st.lists(
        st.lists(
            st.tuples(st.sampled_from(MEASURED_TIERS), st.integers(1, 3000), st.sampled_from((1, 1, 1, 5))),
            max_size=70,
        ),
        min_size=1,
        max_size=2,
    ),
    st.integers(0, MAX_ASYNC_DECODES),
)
def test_a_bucket_holds_its_plan_and_not_much_more(
    parts: list[list[tuple[KVTier, int, int]]], num_slots: int
) -> None:
    sub_batches = tuple(
        SubBatch(
            tuple(
                ScheduledSequence(
                    f"{i}.{j}", (1,) * count, 16 * blocks - count, tier, IntArray(range(blocks)).view(), None
                )
                for j, (tier, blocks, count) in enumerate(part)
            )
        )
        for i, part in enumerate(parts)
    )
    plan = IterationPlan(sub_batches, async_decodes=((None,) * num_slots,) * 3 if num_slots else ())
    members = BatchMembers.of_all(plan, MEASURED_TIERS)
    exact = GraphKey.of(plan, members, MEASURED_TIERS, BLOCK_SIZE)
    graph_key = exact.rounded()
    assert graph_key.rounded() == graph_key
    has_prompts = not exact.is_whole
    for rows, padded in zip(exact.sub_batches, graph_key.sub_batches, strict=True):
        counts = (*rows.decodes, rows.async_decodes), (*padded.decodes, padded.async_decodes)
        for count, room in zip(*counts, strict=True):
            assert (
                count <= room <= (max(2 * count, 8) if has_prompts else max(count * 1.5, count)) * bool(count)
            )
        assert rows.prompts <= padded.prompts <= rows.prompts + max(64, padded.count / 16)
    assert sum(rows.async_decodes for rows in exact.sub_batches) == num_slots
    longest = exact.max_blocks
    assert longest <= graph_key.max_blocks <= max(2 * longest, 64)


def test_the_memory_of_a_workspace_is_known_beforehand() -> None:
    config = tiny_config((None,))
    for capacity in (Capacity(64, 8, 64), Capacity(2112, 256, 1024)):
        model = Decoder(config, dtype=torch.float16, device=torch.device("cpu"))
        workspace = Workspace(Stages(model), MEASURED_TIERS, capacity, 32, has_graphs=True)
        states = workspace._states
        tensors = [getattr(state, name) for state in states for name in type(state).__slots__]
        tensors += [getattr(states[0].scratch, name) for name in type(states[0].scratch).__slots__]
        tensors += [workspace._table, workspace._token_ids, workspace.tokens]
        tensors += [workspace.last_hidden, workspace.logits]
        tensors += [workspace._partial_out, workspace._partial_lse]
        pools = {tier: KVPool(config, 1, 16, torch.float16, model.device) for tier in MEASURED_TIERS}
        async_buffers = AsyncBuffers(Stages(model), KVStorage(pools))
        tensors += [async_buffers.waiting, async_buffers.cos, async_buffers.sin]
        taken = sum(tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor))
        assert taken == pytest.approx(device_bytes(config, torch.float16, capacity, 32), rel=0.1)
