"""The memory of graphs and of their buckets."""

import pytest
from graph_case import TOKENS, decodes, make_executor, prompts
from pipeline_case import (
    reference_logprobs,
    tiny_model,
)

from neo_desktop.engine.batch import (
    IterationPlan,
    SubBatch,
)
from neo_desktop.engine.execute.layout import Capacity
from neo_desktop.models.decoder import Decoder
from neo_desktop.models.linear.dense import Dense

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
