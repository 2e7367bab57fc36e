"""Iterations as graphs give the tokens of a plain computation, in any order of the streams."""

from dataclasses import replace

import pytest
import torch
from fallback_levels import Levels
from graph_case import GREEDY, HOMES, TOKENS, contexts, decodes, make_executor, prompts, sequence
from imitated_streams import ImitatedBackend
from pipeline_case import (
    RandomIterations,
    check_random_plans,
    check_result,
    make_storage,
    reference_logprobs,
    tiny_config,
    tiny_model,
)
from seeds import seeds

from neo_desktop.engine.batch import (
    BlockCopy,
    IterationPlan,
    SamplingInput,
    SubBatch,
)
from neo_desktop.engine.cuda.streams import Streams
from neo_desktop.engine.execute.build import build_executor
from neo_desktop.engine.execute.timeline import Timeline
from neo_desktop.engine.grammar import GrammarCompiler, from_regex
from neo_desktop.engine.int_array import IntArray
from neo_desktop.engine.kv_tier import MEASURED_TIERS, KVTier
from neo_desktop.engine.sampling_params import SamplingParams
from neo_desktop.models.decoder import Decoder
from neo_desktop.models.linear.dense import Dense, Plain
from neo_desktop.models.tokenizer import ByteTokenizer

BLOCK_SIZE = 16
PLAIN = Dense(uses_tiles=False)  # the weight layout of a GPU


pytestmark = pytest.mark.usefixtures("kernels")
both_kernels = pytest.mark.parametrize("kernels", ["triton", "torch"], indirect=True)


@pytest.fixture(scope="module")
def model() -> Decoder:
    """A model of two layers, one with a sliding window."""
    return tiny_model((None, 5), form=PLAIN, attention_sinks=True, softcap=0.5)


@pytest.mark.parametrize(
    "kernels", ["torch", pytest.param("triton", marks=pytest.mark.sample(0))], indirect=True
)
@pytest.mark.parametrize("seed", range(2))
def test_decodes_in_both_places_and_sub_batches(model: Decoder, seed: int) -> None:
    executor, backend = make_executor(model, seed)
    executor.execute(prompts("abcdef"))
    for step in range(3):
        plan = decodes("abcd", "fe", step=step)
        result = executor.execute(plan)
        check_result(model, plan, contexts(plan), result)
        assert result.timing is not None
        assert 0 < result.timing.host_attention_ms < result.timing.total_ms
        # Step 0 runs eagerly, which compiles; step 1 captures; step 2 takes as long as all later steps.
        assert result.timing.is_first == (step < 2)
        assert backend.num_graphs_launched == (step > 0)
    executor.close()


def mixed(step: int = 0, start: int = 10) -> IterationPlan:
    """Return decodes of both tiers, a new device prompt, and a host prompt that continues at `start`."""
    first = decodes("abc", step=step).sub_batches[0].sequences
    new, more = sequence("f", 0, 17), sequence("d", start, 25)
    second = decodes("e", step=step).sub_batches[0].sequences
    ordered = [new, *(s for s in first if s.tier == KVTier.DEVICE), more]
    ordered += [s for s in first if s.tier == KVTier.HOST]
    return IterationPlan((SubBatch(tuple(ordered)), SubBatch(second)))


@pytest.mark.sample(5)
@pytest.mark.parametrize(("start", "num_graphs"), [(0, 3), (10, 4)])  # without and with KV to fetch
@pytest.mark.parametrize("num_queues", [None, 1, 2, 3, 8])
def test_iterations_with_prompts_are_graphs_between_their_attention(
    model: Decoder, num_queues: int | None, start: int, num_graphs: int
) -> None:
    """Besides graphs, the device receives only prompt attention and its waits."""
    backend = ImitatedBackend(num_queues or 0, num_queues=num_queues)
    executor, _ = make_executor(model, backend=backend)
    executor.execute(prompts("abcde"))
    for step in range(4):
        plan = mixed(step, start)
        check_result(model, plan, contexts(plan), executor.execute(plan))
        backend.check_flags()
        assert backend.was_graph == (step > 0)
    assert backend.num_programs == 1
    assert backend.num_graphs_launched == num_graphs  # of two layers
    executor.close()


def test_graphs_serve_prompts_of_other_lengths(model: Decoder) -> None:
    executor, backend = make_executor(model)
    executor.execute(prompts("bc"))
    for start, end in ((0, 9), (9, 10), (10, 22), (22, 30)):
        chunk = sequence("a", start, end)
        rest = decodes("bc").sub_batches[0].sequences
        plan = IterationPlan((SubBatch((chunk, *rest)),))
        check_result(model, plan, contexts(plan), executor.execute(plan))
    assert backend.num_programs == 1
    executor.close()


@pytest.mark.parametrize("seed", seeds(2, 4))
def test_random_plans_on_streams_of_any_order(model: Decoder, seed: int) -> None:
    backend = ImitatedBackend(seed, num_queues=seed or None)
    executor, _ = make_executor(model, backend=backend)
    iterations = RandomIterations(seed, block_size=BLOCK_SIZE)
    check_random_plans(executor.execute, model, iterations, 8, after=backend.check_flags)
    executor.close()


@pytest.mark.parametrize("seed", seeds(2, 3))
def test_decodes_whose_blocks_move_wait_for_them_in_every_layer(model: Decoder, seed: int) -> None:
    executor, _ = make_executor(model, seed)
    executor.execute(prompts("abcd"))
    homes = dict(HOMES)
    for step in range(3):
        plan = decodes("ab", "cd", step=step)
        there, back = homes["a"][1], (20, 21) if step % 2 == 0 else (0, 5)
        ways = (KVTier.DEVICE, KVTier.HOST) if step % 2 == 0 else (KVTier.HOST, KVTier.DEVICE)
        copies = tuple(BlockCopy(ways[0], a, ways[1], b) for a, b in zip(there, back, strict=True))
        homes["a"] = (ways[1], back, 20)
        moved = [
            s._replace(tier=ways[1], block_table=IntArray(back).view()) if s.request_id == "a" else s
            for s in plan.sub_batches[0].sequences
        ]
        moved.sort(key=lambda s: MEASURED_TIERS.index(s.tier))
        plan = IterationPlan((SubBatch(tuple(moved)), plan.sub_batches[1]), copies)
        check_result(model, plan, contexts(plan), executor.execute(plan))
    executor.close()


@pytest.mark.parametrize("parts", [("abf",), ("cde",), ("cd", "e"), ("ac",), ("", "a")])
def test_one_place_or_one_sub_batch(model: Decoder, parts: tuple[str, ...]) -> None:
    """Cover `gpu-only`, `fastdecode`, and one sub-batch with attention on both CPU and device."""
    names = "".join(parts)
    executor, _ = make_executor(model, tiers={HOMES[name][0]: None for name in names})
    executor.execute(prompts(names))
    for step in range(2):
        plan = decodes(*parts, step=step)
        check_result(model, plan, contexts(plan), executor.execute(plan))
    executor.close()


def test_a_graph_serves_smaller_iterations_and_what_was_there_before_does_not_matter(model: Decoder) -> None:
    executor, backend = make_executor(model)
    executor.execute(prompts("abcdef"))
    for step, names in ((0, "abfcde"), (1, "abfcde"), (0, "afcde"), (1, "afcde"), (0, "bfcde")):
        plan = decodes(names, step=step)
        check_result(model, plan, contexts(plan), executor.execute(plan))
    assert backend.num_programs == 2
    executor.close()


@both_kernels
def test_every_kind_of_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cover biases everywhere, norms of heads, and an untied head."""
    config = replace(
        tiny_config((None,)),
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        qk_norm=True,
        tie_word_embeddings=False,
        attention_sinks=True,
    )
    monkeypatch.setattr("pipeline_case.tiny_config", lambda windows, **others: config)
    model = tiny_model((None,), form=PLAIN)
    executor, _ = make_executor(model)
    executor.execute(prompts("abcd"))
    for step in range(2):
        plan = decodes("ac", "bd", step=step)
        check_result(model, plan, contexts(plan), executor.execute(plan))
    executor.close()


@both_kernels
def test_warming_up_changes_nothing_that_is_stored(model: Decoder) -> None:
    executor, backend = make_executor(model)
    executor.warm_up()
    assert backend.num_runs == 2
    storage = executor._storage
    assert all(part.isnan().all() for tier in MEASURED_TIERS for part in storage[tier].parts)
    executor.close()


def test_sampling_is_the_same_in_graphs(model: Decoder) -> None:
    params = SamplingParams(temperature=0.9, top_p=0.8, repetition_penalty=1.3, logprobs=2)
    inputs = SamplingInput(params, 5, 0, 21, IntArray((1, 2, 3)).view(), IntArray((4, 4)).view())
    executor, backend = make_executor(model)
    executor.execute(prompts("acd"))
    plan = decodes("ac", "d", sampling=inputs)
    expected = executor.execute(plan).sampled
    sampled = executor.execute(plan).sampled
    assert backend.was_graph
    assert sampled.keys() == expected.keys()
    for name, token in sampled.items():
        assert token.token_id == expected[name].token_id
        assert token.logprob is not None
        assert token.logprob.logprob == pytest.approx(expected[name].logprob.logprob, abs=1e-4)
    executor.close()


def test_grammars_and_biases_are_obeyed_beside_greedy_requests(model: Decoder) -> None:
    compiler = GrammarCompiler(ByteTokenizer(), model.config.vocab_size, ())
    bound = GREEDY._replace(allowed_tokens=compiler.start(from_regex("z")).allowed_tokens)
    compiler.close()
    biased = GREEDY._replace(params=SamplingParams(temperature=0.0, logit_bias={77: 100.0}))
    executor, _ = make_executor(model)
    executor.execute(prompts("acd"))
    sequences = [
        decodes(name, sampling=sampling).sub_batches[0].sequences[0]
        for name, sampling in (("a", GREEDY), ("c", bound), ("d", biased))
    ]
    plan = IterationPlan((SubBatch(tuple(sequences)),))
    (expected,) = reference_logprobs(model, contexts(plan)["a"])
    best = int(expected.argmax())
    for _ in range(2):
        sampled = executor.execute(plan).sampled
        assert {name: token.token_id for name, token in sampled.items()} == {
            "a": best,
            "c": ord("z"),
            "d": 77,
        }
    executor.close()


def test_greedy_tokens_come_without_reading_logits(model: Decoder) -> None:
    executor, _ = make_executor(model)
    executor.execute(prompts("ac"))
    plan = decodes("a", "c", sampling=GREEDY)
    for _ in range(2):
        result = executor.execute(plan)
        for name, context in contexts(plan).items():
            (expected,) = reference_logprobs(model, context)
            assert result.sampled[name].token_id == int(expected.argmax())
    executor.close()


def test_logits_that_are_not_finite_end_their_request_alone(model: Decoder) -> None:
    executor, _ = make_executor(model)
    executor.execute(prompts("abc"))
    plan = decodes("ab", "c", sampling=GREEDY)
    embedding = model.embedding
    model.embedding = broken = Plain(embedding.dense().clone())
    broken.weight[TOKENS["b"][HOMES["b"][2]]] = torch.nan
    try:
        result = executor.execute(plan)
    finally:
        model.embedding = embedding
    assert result.sampled.keys() == {"a", "c"}
    assert "not finite" in result.failed["b"]
    executor.close()


@pytest.mark.gpu
@pytest.mark.usefixtures("any_queues")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("parts", [("abf",), ("cde",), ("abcd", "fe"), ("ac", "d")])
def test_on_a_gpu_graphs_give_the_tokens_of_a_plain_computation(parts: tuple[str, ...]) -> None:
    model = tiny_model((None, 5), device="cuda")
    storage = make_storage(model, dict.fromkeys(MEASURED_TIERS, 24), BLOCK_SIZE)
    timeline = Timeline()
    executor = build_executor(model, storage, 256, 8, timeline, Streams(model.device))
    executor.execute(prompts("abcdef"))
    for step in range(4):  # eager, captured, and replayed
        plan = decodes(*parts, step=step)
        timeline.take()
        check_result(model, plan, contexts(plan), executor.execute(plan), tolerance=2e-3)
        spans = timeline.take()
        lanes = {"device", "cpu", "to-host", "to-device"} if set("cde") & set("".join(parts)) else {"device"}
        assert {span.lane for span in spans} == lanes
        assert all(span.end_ns >= span.start_ns for span in spans)
    executor.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_iterations_with_prompts_are_graphs_between_their_attention() -> None:
    model = tiny_model((None, 5), device="cuda")
    storage = make_storage(model, dict.fromkeys(MEASURED_TIERS, 24), BLOCK_SIZE)
    executor = build_executor(model, storage, 256, 8, None, Streams(model.device))
    executor.execute(prompts("abcde"))
    for step in range(4):
        plan = mixed(step)
        check_result(model, plan, contexts(plan), executor.execute(plan), tolerance=2e-3)
    executor.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("seed", seeds(2, 4))
@pytest.mark.parametrize("level", ["host-flags", "device-only", "eager"])
def test_on_a_gpu_random_plans_give_the_tokens_of_a_plain_computation(
    levels: Levels, seed: int, level: str
) -> None:
    levels(graphs=level)
    model = tiny_model(device="cuda")
    storage = make_storage(model, dict.fromkeys(MEASURED_TIERS, 24), BLOCK_SIZE)
    executor = build_executor(model, storage, 256, 8, None, Streams(model.device))
    iterations = RandomIterations(seed, block_size=BLOCK_SIZE)
    check_random_plans(executor.execute, model, iterations, 12, tolerance=2e-3)
    executor.close()
