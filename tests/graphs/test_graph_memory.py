"""The memory of graphs and of their buckets."""

import pytest
import torch
from graph_case import TOKENS, decodes, make_executor, prompts
from pipeline_case import reference_logprobs, tiny_config, tiny_model

from neo_desktop.engine.batch import IterationPlan, SubBatch
from neo_desktop.engine.execute.async_decodes import AsyncBuffers
from neo_desktop.engine.execute.layout import Capacity
from neo_desktop.engine.execute.workspace import Workspace, device_bytes
from neo_desktop.engine.kv.storage import KVPool, KVStorage
from neo_desktop.engine.kv_tier import MEASURED_TIERS
from neo_desktop.models.decoder import Decoder
from neo_desktop.models.linear.dense import Dense
from neo_desktop.models.stages import Stages

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
        (expected,) = reference_logprobs(model, TOKENS["a"][: one.context_len])
        best = int(expected.argmax())
        assert {token.token_id for token in result.sampled.values()} == {best}
        assert not backend.was_graph
    executor.close()


def test_the_memory_of_a_workspace_is_known_beforehand() -> None:
    config = tiny_config((None,))
    for capacity in (Capacity(64, 8, 64), Capacity(2112, 256, 1024)):
        model = Decoder(config, dtype=torch.float16, device=torch.device("cpu"))
        workspace = Workspace(Stages(model), MEASURED_TIERS, capacity, 32, has_graphs=True, is_staged=True)
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
