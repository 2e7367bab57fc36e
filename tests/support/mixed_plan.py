"""A plan that uses every lane in every layer, and the plan of the prompts before it."""

from collections.abc import Sequence

from executors import Hook, HookedLanes, thread_executor
from pipeline_case import (
    BLOCK_SIZE,
    check_result,
    make_storage,
    sampling_input,
)
from torch_layer import TorchLayer

from neo_desktop.engine.batch import (
    BlockCopy,
    IterationPlan,
    ScheduledSequence,
    SubBatch,
)
from neo_desktop.engine.execute.lane import Lane
from neo_desktop.engine.execute.model_runner import ModelRunner
from neo_desktop.engine.execute.timeline import Timeline
from neo_desktop.engine.int_array import IntArray
from neo_desktop.engine.kv.layer import KVLayer
from neo_desktop.engine.kv_tier import MEASURED_TIERS, KVTier
from neo_desktop.models.decoder import Decoder

NUM_BLOCKS = 24


# All lanes except the ones for weights in host memory and streamed KV.
_OTHERS = (Lane.WEIGHTS, Lane.EXPERTS, Lane.HOST_WEIGHTS, Lane.SWAP_IN, Lane.SWAP_OUT)


LANES = tuple(lane for lane in Lane if lane not in _OTHERS)


def make_executor(
    model: Decoder,
    hook: Hook | None = None,
    timeline: Timeline | None = None,
    block_size: int = BLOCK_SIZE,
    device_kind: type[KVLayer] | None = TorchLayer,
) -> ModelRunner:
    num_blocks = dict.fromkeys(MEASURED_TIERS, NUM_BLOCKS)
    storage = make_storage(model, num_blocks, block_size, device_kind=device_kind)
    lanes = None if hook is None else HookedLanes(hook, timeline)
    return thread_executor(model, storage, lanes=lanes, timeline=timeline)


def sequence(
    name: str, tokens: Sequence[int], start: int, tier: KVTier, first_block: int
) -> ScheduledSequence:
    num_blocks = -(-(start + len(tokens)) // BLOCK_SIZE)
    blocks = IntArray(range(first_block, first_block + num_blocks)).view()
    return ScheduledSequence(name, tuple(tokens), start, tier, blocks, sampling_input(start + len(tokens)))


# Two iterations: the second uses every lane in every layer, for both sub-batches.
TOKENS = {name: [(7 * ord(name) + 3 * i) % 257 for i in range(30)] for name in "abcdef"}


HOMES = {
    "a": (KVTier.DEVICE, 0),
    "b": (KVTier.HOST, 0),
    "c": (KVTier.HOST, 4),
    "d": (KVTier.HOST, 8),
    "e": (KVTier.HOST, 12),
}


def prompts() -> IterationPlan:
    """Compute the first tokens of the named requests in their tiers."""
    return IterationPlan(
        (SubBatch(tuple(sequence(name, TOKENS[name][:20], 0, *home) for name, home in HOMES.items())),)
    )


def mixed() -> IterationPlan:
    """Decode some, prefill others further, move `a` to the host, give its blocks to a new prompt."""
    parts = (
        (
            sequence("f", TOKENS["f"][:9], 0, KVTier.DEVICE, 0),
            sequence("b", TOKENS["b"][20:30], 20, *HOMES["b"]),
            sequence("c", TOKENS["c"][20:21], 20, *HOMES["c"]),
        ),
        (
            sequence("d", TOKENS["d"][20:25], 20, *HOMES["d"]),
            sequence("e", TOKENS["e"][20:21], 20, *HOMES["e"]),
            sequence("a", TOKENS["a"][20:21], 20, KVTier.HOST, 20),
        ),
    )
    copies = tuple(BlockCopy(KVTier.DEVICE, block, KVTier.HOST, 20 + block) for block in range(3))
    return IterationPlan(tuple(SubBatch(part) for part in parts), copies)


def run_and_check(model: Decoder, executor: ModelRunner, plan: IterationPlan) -> None:
    contexts = {s.request_id: TOKENS[s.request_id][: s.context_len] for s in plan.sequences}
    check_result(model, plan, contexts, executor.execute(plan))
