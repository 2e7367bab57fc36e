"""Plans for a tiny model, and an executor on an imitated GPU."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from imitated_streams import Hook, ImitatedBackend
from pipeline_case import make_storage, sampling_input

from neo_desktop.engine.batch import IterationPlan, SamplingInput, ScheduledSequence, SubBatch
from neo_desktop.engine.execute.layout import Capacity
from neo_desktop.engine.execute.model_runner import ModelRunner
from neo_desktop.engine.execute.timeline import Timeline
from neo_desktop.engine.int_array import IntArray
from neo_desktop.engine.kernels import dispatch
from neo_desktop.engine.kv.device_layer import DeviceLayer
from neo_desktop.engine.kv_tier import MEASURED_TIERS, KVTier
from neo_desktop.engine.sampling_params import SamplingParams
from neo_desktop.engine.watchdog import DEFAULT_TIMEOUT, Timeout
from neo_desktop.models.decoder import Decoder
from neo_desktop.models.registry import stages_of

BLOCK_SIZE = 16
NUM_BLOCKS = 24
CAPACITY = Capacity(tokens=256, decodes=8, blocks=64)
GREEDY = SamplingInput(SamplingParams(temperature=0.0), 0, 0, 21, IntArray().view(), IntArray().view())


def make_executor(
    model: Decoder,
    seed: int = 0,
    hook: Hook | None = None,
    tiers: Collection[KVTier] = MEASURED_TIERS,
    backend: ImitatedBackend | None = None,
    timeline: Timeline | None = None,
    capacity: Capacity = CAPACITY,
    timeout: Timeout = DEFAULT_TIMEOUT,
    *,
    moves_experts: bool = False,
) -> tuple[ModelRunner, ImitatedBackend]:
    storage = make_storage(model, dict.fromkeys(tiers, NUM_BLOCKS), BLOCK_SIZE, device_kind=DeviceLayer)
    backend = backend or ImitatedBackend(seed, hook)
    executor = ModelRunner(
        stages_of(model, dispatch),
        storage,
        capacity,
        backend,
        num_programs=8,
        uses_gpu=True,
        timeline=timeline,
        timeout=timeout,
        moves_experts=moves_experts,
    )
    return executor, backend


TOKENS = {name: [(7 * ord(name) + 3 * i) % 257 for i in range(40)] for name in "abcdefg"}


@dataclass(frozen=True)
class Requests:
    """Requests with the tokens of `TOKENS`.

    Args:
        homes: name -> tier, blocks, number of tokens before the first decode.
        tiers: their order in a sub-batch.
    """

    homes: Mapping[str, tuple[KVTier, tuple[int, ...], int]]
    tiers: Sequence[KVTier]

    def sequence(
        self, name: str, start: int, end: int, sampling: SamplingInput | None = None
    ) -> ScheduledSequence:
        tier, blocks, _ = self.homes[name]
        tokens = tuple(TOKENS[name][start:end])
        return ScheduledSequence(
            name, tokens, start, tier, IntArray(blocks).view(), sampling or sampling_input(end)
        )

    def prompts(self, names: str) -> IterationPlan:
        ordered = sorted(names, key=lambda name: self.tiers.index(self.homes[name][0]))
        batch = tuple(self.sequence(name, 0, self.homes[name][2]) for name in ordered)
        return IterationPlan((SubBatch(batch),))

    def decodes(self, *names: str, step: int = 0, sampling: SamplingInput | None = None) -> IterationPlan:
        """Return a plan with the first decodes after the prompts, one sub-batch per string of names."""

        def one(name: str) -> ScheduledSequence:
            start = self.homes[name][2] + step
            return self.sequence(name, start, start + 1, sampling)

        return IterationPlan(tuple(SubBatch(tuple(one(name) for name in part)) for part in names))


HOMES = {
    "a": (KVTier.DEVICE, (0, 5), 20),
    "b": (KVTier.DEVICE, (2,), 3),
    "c": (KVTier.HOST, (8, 1), 16),
    "d": (KVTier.HOST, (0, 7), 25),
    "e": (KVTier.HOST, (3,), 1),
    "f": (KVTier.DEVICE, (9, 11), 17),
    "g": (KVTier.HOST, (4, 6), 9),
}
_REQUESTS = Requests(HOMES, MEASURED_TIERS)
sequence, prompts, decodes = _REQUESTS.sequence, _REQUESTS.prompts, _REQUESTS.decodes


def contexts(plan: IterationPlan) -> dict[str, list[int]]:
    return {s.request_id: TOKENS[s.request_id][: s.context_len] for s in plan.sequences}
