"""Several answers to one prompt: its KV is computed and kept once, in every tier."""

from pathlib import Path

import pytest
from engine_fakes import FakeExecutor, make_request, reference_output
from kv_invariants import check_kv

from neo_desktop.engine.engine import Engine
from neo_desktop.engine.kv.cache import KVCache
from neo_desktop.engine.kv_tier import KVTier
from neo_desktop.engine.sampling_params import SamplingParams
from neo_desktop.engine.schedule.policies import Policy
from neo_desktop.engine.schedule.scheduler import Scheduler, SchedulerLimits

BLOCK_SIZE = 16
PROMPT = list(range(1000))  # 62 full blocks and half a block
OUTPUT_TOKENS = 30
FULL, OWN = 62, 3  # shared blocks, and blocks per answer: 8 tokens of the prompt and 29 of the answer


class Run:
    """Result of n parallel answers in one tier."""

    def __init__(self, tier: KVTier, n: int, *, look_ahead: bool = False) -> None:
        self.kv = KVCache({tier: 1000}, BLOCK_SIZE)
        limits = SchedulerLimits(max_batch_tokens=4096, max_batch_requests=16)
        scheduler = Scheduler(self.kv, Policy("one place", (tier,)), limits)
        executor = FakeExecutor(BLOCK_SIZE, 4096)
        requests = [
            make_request(f"{i}", PROMPT, SamplingParams(max_tokens=OUTPUT_TOKENS), arrival=i)
            for i in range(n)
        ]
        for request in requests:
            scheduler.add(request)
        self.most_blocks = self.num_computed = self.num_iterations = 0
        tokens: dict[str, list[int]] = {request.owner_id: [] for request in requests}
        while (plan := scheduler.schedule()) is not None:
            self.num_iterations += 1
            self.num_computed += sum(len(sequence.token_ids) for sequence in plan.all_sequences)
            self.most_blocks = max(self.most_blocks, self.kv.usage()[tier].num_used_blocks)
            if look_ahead:
                scheduler.look_ahead()
            for gained in scheduler.update(executor.execute(plan)):
                output = gained.take_output()
                tokens[gained.owner_id] += [token.token_id for token in output.tokens]
            check_kv(self.kv)
        for request in requests:
            assert tokens[request.owner_id] == reference_output(request, OUTPUT_TOKENS)


@pytest.mark.parametrize("look_ahead", [False, True])
@pytest.mark.parametrize("tier", [KVTier.DEVICE, KVTier.HOST, KVTier.STREAMED, KVTier.worker(1)])
@pytest.mark.parametrize("n", [1, 4, 8])
def test_each_answer_takes_its_own_blocks_and_the_prompt_its_own(
    tier: KVTier, n: int, look_ahead: bool
) -> None:
    run = Run(tier, n, look_ahead=look_ahead)
    assert run.most_blocks == FULL + n * OWN
    # The first answer computes the prompt, the others compute the tokens in its last block.
    assert run.num_computed == 1000 + (n - 1) * 8 + n * (OUTPUT_TOKENS - 1)
    # The others start exactly one iteration later.
    assert run.num_iterations == OUTPUT_TOKENS + (n > 1)


@pytest.mark.parametrize("policy", ["gpu-only", "fastdecode", "auto"])
def test_answers_that_share_are_those_that_a_chat_alone_would_get(
    checkpoints: dict[str, Path], policy: str
) -> None:
    greedy, prompt = SamplingParams(max_tokens=12, temperature=0.0), list(range(3, 103))
    machine = {"device": "cpu", "policy": policy, "gpu_cache_tokens": 512, "cpu_cache_tokens": 512}
    with Engine.from_pretrained(checkpoints["llama"], **machine) as engine:
        alone = engine.generate([prompt], greedy)[0]
    with Engine.from_pretrained(checkpoints["llama"], **machine) as engine:
        answers = engine.generate([prompt], SamplingParams(max_tokens=12, temperature=0.0, n=4))
    assert [answer.token_ids for answer in answers] == [alone.token_ids] * 4
    assert [answer.num_cached_tokens for answer in answers] == [0, 96, 96, 96]
