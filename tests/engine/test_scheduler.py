"""Every request ends with its own tokens, within the budgets, in scarce memory."""

from collections import defaultdict

import pytest
from async_policy import AllAsync
from cost_models import THIRD, cost_models
from drafters import OftenRight
from engine_fakes import FakeExecutor, free_blocks, make_request, reference_output
from hypothesis import given
from hypothesis import strategies as st
from kv_invariants import check_kv

from neo_desktop.engine.batch import IterationPlan
from neo_desktop.engine.kv.cache import KVCache
from neo_desktop.engine.kv_tier import MEASURED_TIERS, KVTier
from neo_desktop.engine.predict.cost_model import TableCostModel
from neo_desktop.engine.request import FinishReason, Request, RequestOutput
from neo_desktop.engine.sampling_params import SamplingParams
from neo_desktop.engine.schedule.policies import POLICIES, Fastest, Halves, Hidden, Policy
from neo_desktop.engine.schedule.scheduler import Scheduler, SchedulerLimits
from neo_desktop.engine.schedule.speculation import Speculation
from neo_desktop.engine.speculate.drafter import Drafter

BLOCK_SIZE = 4
ALL_TIERS = (*MEASURED_TIERS, THIRD)
ALL_POLICIES = POLICIES | {
    policy.name: policy
    for policy in (
        Policy("all in turn", ALL_TIERS),
        Halves("two that the host attends for", (THIRD, KVTier.HOST)),
        Hidden("neo in three places", ALL_TIERS),
        Fastest("auto in three places", ALL_TIERS),
        Fastest("the host's memory first", (THIRD, KVTier.DEVICE, KVTier.HOST)),
        AllAsync("own pace", ALL_TIERS),
        Fastest("auto with swapped layers", (KVTier.DEVICE, KVTier.STREAMED, KVTier.HOST)),
    )
}


class Harness:
    """Scheduler, KV cache and fake model, with all outputs collected."""

    def __init__(
        self,
        num_blocks: dict[KVTier, int],
        policy: str = "auto",
        max_batch_tokens: int = 16,
        max_batch_requests: int = 8,
        cost_model: TableCostModel | None = None,
        drafter: Drafter | None = None,
        num_states: int | None = None,
    ) -> None:
        self.kv = KVCache(num_blocks, BLOCK_SIZE, num_states)
        self.scheduler = Scheduler(
            self.kv,
            ALL_POLICIES[policy],
            SchedulerLimits(max_batch_tokens, max_batch_requests),
            cost_model,
            speculation=drafter and Speculation(drafter, cost_model, max_batch_requests),
        )
        num_layers = self.scheduler.queues.async_groups.num_layers
        self.executor = FakeExecutor(BLOCK_SIZE, max_batch_tokens, num_layers=num_layers)
        self.max_batch_requests = max_batch_requests
        self.requests: dict[str, Request] = {}
        self.outputs: dict[str, list[RequestOutput]] = defaultdict(list)
        self.num_blocks = num_blocks
        self.was_short = False  # out of device memory before, so iterations may be smaller than requested

    def add(self, prompt: list[int], max_tokens: int) -> str:
        name = str(len(self.requests))
        request = make_request(
            name, prompt, SamplingParams(max_tokens=max_tokens), arrival=len(self.requests)
        )
        self.requests[name] = request
        self.scheduler.add(request)
        return name

    def start(self) -> IterationPlan | None:
        running = {f"{name}#0" for name in self.requests if f"{name}#0" in self.kv}
        plan = self.scheduler.schedule()
        check_kv(self.kv)
        if plan is None:
            return None
        assert self.scheduler.queues.num_running <= self.max_batch_requests
        names = [sequence.request_id for sequence in plan.all_sequences if not sequence.is_draft]
        assert len(names) == len(set(names)), "a request is scheduled twice"
        for name in running:
            if name in self.kv and name not in names and not self.was_short:
                assert self.kv.tier_of(name).in_host_memory, "a request on the device had to wait"
        return plan

    def finish(self, plan: IterationPlan) -> None:
        gained = self.scheduler.update(self.executor.execute(plan))
        self.collect([request.take_output() for request in gained])

    def step(self, look_ahead: bool = False) -> IterationPlan | None:
        plan = self.start()
        if plan is not None:
            if look_ahead:
                self.scheduler.look_ahead()
                check_kv(self.kv)
            self.finish(plan)
        return plan

    def collect(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            self.outputs[output.request_id].append(output)
        check_kv(self.kv)

    def run(self, max_iterations: int = 5000, look_ahead: bool = False) -> None:
        for _ in range(max_iterations):
            if self.step(look_ahead) is None:
                return
        raise AssertionError("the requests do not end")

    def tokens(self, name: str) -> list[int]:
        return [token.token_id for output in self.outputs[name] for token in output.tokens]

    def assert_all_answered(self) -> None:
        for name, request in self.requests.items():
            last = self.outputs[name][-1]
            if last.finish_reason is FinishReason.ABORT:
                count = len(self.tokens(name))
            else:
                assert last.finish_reason is FinishReason.LENGTH
                count = request.params.max_tokens or 0
            assert self.tokens(name) == reference_output(request, count)
        assert free_blocks(self.kv) == self.num_blocks


jobs = st.lists(
    st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=20), st.integers(1, 30)),
    min_size=1,
    max_size=12,
)


@given(
    jobs=jobs,
    policy=st.sampled_from(sorted(ALL_POLICIES)),
    device_blocks=st.integers(13, 20),
    host_blocks=st.integers(0, 30),
    third_blocks=st.integers(0, 30),
    streamed_blocks=st.integers(0, 30),
    cost_model=cost_models(ALL_TIERS),
    max_batch_requests=st.integers(1, 6),
    extra_tokens=st.integers(0, 20),
    right_drafts=st.none() | st.sampled_from((0.0, 0.5, 0.9, 1.0)),
    num_states=st.none() | st.integers(4, 40),
    data=st.data(),
)
def test_every_request_ends_with_the_tokens_it_would_get_alone(
    jobs: list[tuple[list[int], int]],
    policy: str,
    device_blocks: int,
    host_blocks: int,
    third_blocks: int,
    streamed_blocks: int,
    max_batch_requests: int,
    extra_tokens: int,
    cost_model: TableCostModel,
    right_drafts: float | None,
    num_states: int | None,
    data: st.DataObject,
) -> None:
    """Memory is scarce; 13 blocks hold the longest request. Drafts may be right, wrong or missing.

    At any time, also during an iteration, requests arrive and are aborted, and the next iteration is
    planned. The device may run out of memory during any iteration.
    """
    tiers = ALL_POLICIES[policy].tiers
    if KVTier.DEVICE not in tiers:
        host_blocks += 13
    num_blocks = {
        KVTier.DEVICE: device_blocks,
        KVTier.HOST: host_blocks,
        THIRD: third_blocks,
        KVTier.STREAMED: streamed_blocks,
    }
    harness = Harness(
        {tier: num_blocks[tier] for tier in tiers},
        policy,
        max_batch_tokens=max_batch_requests + extra_tokens,
        max_batch_requests=max_batch_requests,
        cost_model=cost_model,
        drafter=None if right_drafts is None else OftenRight(right_drafts),
        num_states=num_states,
    )
    pending = list(jobs)
    plan: IterationPlan | None = None
    while pending or plan is not None:
        action = data.draw(st.sampled_from(("add", "add", "go on", "go on", "look ahead", "shrink", "abort")))
        if action == "add" and pending:
            harness.add(*pending.pop())
        elif action == "go on":
            if plan is None:
                plan = harness.start()
            else:
                harness.finish(plan)
                plan = None
        elif action == "look ahead" and plan is not None:
            harness.scheduler.look_ahead()
        elif action == "shrink" and plan is not None and sum(b.num_tokens for b in plan.sub_batches) > 1:
            if data.draw(st.booleans()):
                harness.executor.execute(plan)  # the failed iteration got that far
            assert harness.scheduler.shrink()
            harness.was_short = True
            plan = None
        elif action == "abort" and harness.requests:
            victim = data.draw(st.sampled_from(sorted(harness.requests)))
            harness.collect(harness.scheduler.abort(victim))
        check_kv(harness.kv)
    harness.run(look_ahead=data.draw(st.booleans()))
    harness.assert_all_answered()


@pytest.mark.parametrize(("num_states", "is_ahead"), [(4, False), (5, False), (6, True)])
def test_hybrids_are_planned_ahead_if_each_has_a_third_slot(num_states: int, is_ahead: bool) -> None:
    """Two slots are enough for every request to get its tokens."""
    harness = Harness({KVTier.DEVICE: 64}, "gpu-only", num_states=num_states)
    for index in range(2):
        harness.add([index] * 3, 12)
    for _ in range(3):
        harness.step()
    assert harness.scheduler.queues.num_running == 2
    plan = harness.start()
    assert plan is not None
    assert all(len(sequence.token_ids) == 1 for sequence in plan.sequences)
    assert (harness.scheduler.look_ahead(may_plan=True) is not None) == is_ahead
    if is_ahead:
        harness.scheduler.begin()
        harness.scheduler.take_back()
    harness.finish(plan)
    harness.run()
    harness.assert_all_answered()


def test_a_full_device_pool_spills_to_the_host_only_under_auto() -> None:
    num_blocks = {KVTier.DEVICE: 8, KVTier.HOST: 64}
    auto = Harness(num_blocks, "auto", max_batch_tokens=64)
    for index in range(6):
        auto.add([index] * 15, 10)
    plan = auto.step()
    assert plan is not None
    assert {sequence.tier for sequence in plan.sequences} == {KVTier.DEVICE, KVTier.HOST}
    auto.run()
    auto.assert_all_answered()
    assert auto.scheduler.counters.num_preemptions == 0

    gpu_only = Harness({KVTier.DEVICE: 8}, "gpu-only", max_batch_tokens=64)
    for index in range(6):
        gpu_only.add([index] * 15, 10)
    gpu_only.run()
    gpu_only.assert_all_answered()
    assert [gpu_only.tokens(str(index)) for index in range(6)] == [
        auto.tokens(str(index)) for index in range(6)
    ]


def test_a_long_prompt_is_prefilled_in_chunks_while_others_go_on_decoding() -> None:
    harness = Harness({KVTier.DEVICE: 64}, "gpu-only", max_batch_tokens=8)
    harness.add([1, 2], 20)
    harness.step()
    long = harness.add(list(range(50)), 2)
    num_chunks = 0
    while not harness.outputs[long]:
        before = len(harness.tokens("0"))
        plan = harness.step()
        assert plan is not None
        assert len(harness.tokens("0")) == before + 1, "a decode waited for a prefill"
        num_chunks += 1
    assert num_chunks == 8  # 50 tokens, 7 a time beside the one decode


def test_requests_are_admitted_in_the_order_of_their_arrival() -> None:
    harness = Harness({KVTier.DEVICE: 8}, "gpu-only", max_batch_tokens=64)
    big, bigger, small = harness.add([1] * 20, 4), harness.add([2] * 24, 4), harness.add([3], 1)
    plan = harness.step()
    assert plan is not None
    # The second request does not fit; the third would, but overtaking could starve the second.
    assert [sequence.request_id for sequence in plan.sequences] == [f"{big}#0"]
    harness.run()
    assert len(harness.tokens(bigger)) == 4
    assert len(harness.tokens(small)) == 1


def test_the_youngest_is_preempted_and_still_gets_its_tokens() -> None:
    harness = Harness({KVTier.DEVICE: 6}, "gpu-only", max_batch_tokens=64)
    old, young = harness.add([1] * 8, 12), harness.add([2] * 6, 12)
    harness.run()
    assert harness.scheduler.counters.num_preemptions > 0
    assert harness.outputs[old][-1].num_output_tokens == 12
    finished = [name for name in (old, young) if harness.requests[name].num_preemptions]
    assert finished == [young]
    harness.assert_all_answered()


def test_a_request_moves_up_to_the_device_when_there_is_ample_room() -> None:
    harness = Harness({KVTier.DEVICE: 8, KVTier.HOST: 8}, "auto", max_batch_tokens=64)
    harness.add([1] * 27, 2)
    mover = harness.add([2] * 10, 12)
    plan = harness.step()
    assert plan is not None
    assert [sequence.tier for sequence in plan.sequences] == [KVTier.DEVICE, KVTier.HOST]
    harness.run()
    assert harness.scheduler.counters.num_moves == 1
    harness.assert_all_answered()
    assert harness.requests[mover].num_preemptions == 0


def test_a_failed_iteration_ends_its_requests_and_frees_their_blocks() -> None:
    harness = Harness({KVTier.DEVICE: 8}, "gpu-only")
    harness.add([1, 2, 3], 4)
    plan = harness.scheduler.schedule()
    assert plan is not None
    (output,) = harness.scheduler.fail("the card fell out")
    assert (output.finish_reason, output.error) == (FinishReason.ERROR, "the card fell out")
    assert free_blocks(harness.kv) == harness.num_blocks
    harness.add([4], 2)
    harness.run()
    assert len(harness.tokens("1")) == 2
