"""A tiny engine on a computer whose other programs sometimes need memory."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from pipeline_case import tiny_model

from neo_desktop import Engine, SamplingParams
from neo_desktop.engine.cuda.streams import Streams
from neo_desktop.engine.host_reserve import PLENTY_S, HostReserve
from neo_desktop.engine.kv_tier import KVTier
from neo_desktop.engine.loading import LoadedModel
from neo_desktop.engine.options import EngineOptions
from neo_desktop.engine.schedule.policies import POLICIES
from neo_desktop.engine.setup import take_memory
from neo_desktop.models.tokenizer import ByteTokenizer

RESERVE = 1000  # bytes, on a machine with blocks of one byte
MEASURED_TIERS = {
    "neo": (KVTier.DEVICE, KVTier.HOST),
    "auto": (KVTier.DEVICE, KVTier.STREAMED, KVTier.HOST),
    "pie": (KVTier.DEVICE, KVTier.STREAMED),
    "fastdecode": (KVTier.HOST,),
}


class Machine:
    """Available memory per query, and a clock that advances with each query."""

    def __init__(self, available: Sequence[int]) -> None:
        self._available = iter(available)
        self._now_s = 0.0

    def clock(self) -> float:
        self._now_s += PLENTY_S
        return self._now_s

    def available(self) -> int:
        return next(self._available, RESERVE)


@contextmanager
def tiny_engine(policy: str, dtype: str = "auto", machine: Machine | None = None) -> Iterator[Engine]:
    decoder = tiny_model((None, 5, None))
    decoder.config = replace(decoder.config, max_context_tokens=256)
    loaded = LoadedModel("tiny", decoder.config, decoder, ByteTokenizer(), Streams(decoder.device))
    options = EngineOptions(
        policy=policy,
        gpu_cache_tokens=320,
        cpu_cache_tokens=640,
        swap_cache_tokens=640 if KVTier.STREAMED in POLICIES[policy].tiers else None,
        max_batch_tokens=64,
        max_batch_requests=8,
        cpu_cache_dtype=dtype,
    )
    parts = take_memory(loaded, options, MEASURED_TIERS.get(policy))
    with Engine.from_parts(parts, policy) as engine:
        if machine is not None:
            engine._reserve = HostReserve(
                engine._scheduler, engine._kv_cache, parts.storage, RESERVE, machine.clock, machine.available
            )
        yield engine


SHARED = [(5 * i) % 257 for i in range(40)]
PROMPTS = [[*SHARED[: 8 * (i % 5)], *((7 * i + 3 * j) % 257 for j in range(9 + 11 * i))] for i in range(8)]
PARAMS = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
