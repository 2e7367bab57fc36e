"""A tiny model's engine, made quickly, and its prompts."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from imitated_device import ILLEGAL_ADDRESS, imitated_device
from pipeline_case import tiny_model

from neo_desktop import Engine, SamplingParams
from neo_desktop.engine.cuda.streams import Streams
from neo_desktop.engine.kv_tier import KVTier
from neo_desktop.engine.loading import LoadedModel
from neo_desktop.engine.options import EngineOptions
from neo_desktop.engine.setup import take_memory
from neo_desktop.models.tokenizer import ByteTokenizer

PROMPTS = [[(7 * i + 3 * j) % 257 for j in range(size)] for i, size in enumerate((5, 19, 12))]
PARAMS = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
Tokens = list[tuple[int, ...]]


def make_engine(policy: str, device: str = "cuda", tiers: Sequence[KVTier] | None = None) -> Engine:
    """Return an engine; `gpu-only` keeps all KV on the device, `fastdecode` in host memory.

    Args:
        tiers: KV tiers that no public policy has.
    """
    decoder = tiny_model((None, 5), device=device)
    decoder.config = replace(decoder.config, max_context_tokens=256)  # fewer kernels to warm up
    loaded = LoadedModel("tiny", decoder.config, decoder, ByteTokenizer(), Streams(decoder.device))
    options = EngineOptions(
        policy=policy if tiers is None else "auto",
        gpu_cache_tokens=256,
        cpu_cache_tokens=256,
        swap_cache_tokens=256,
        max_batch_tokens=64,
        max_batch_requests=4,
    )
    return Engine.from_parts(take_memory(loaded, options, tiers), policy)


@contextmanager
def engine(policy: str, device: str = "cuda", tiers: Sequence[KVTier] | None = None) -> Iterator[Engine]:
    """Yield `make_engine`'s engine, and always close it."""
    made = make_engine(policy, device, tiers)
    try:
        yield made
    finally:
        made.close()


def tokens_of(engine: Engine) -> Tokens:
    """Return the engine's answers to all prompts in one batch."""
    return [completion.token_ids for completion in engine.generate(PROMPTS, PARAMS)]


@dataclass(frozen=True)
class DyingAtFirst:
    """Engine factory for a child process; the imitated GPU of the first engine dies at work.

    Args:
        policy: policy of the engine.
        operation: GPU operation that dies, counted from the end of loading.
        loads: file that gets a line per load.
    """

    policy: str
    operation: int
    loads: Path

    def __call__(self, progress: Callable[[float, str], object]) -> Engine:
        is_first = not self.loads.exists()
        with self.loads.open("a") as file:
            file.write("a load\n")
        made = make_engine(self.policy)
        device = imitated_device()
        assert device is not None
        if is_first:
            device.fail("operation", ILLEGAL_ADDRESS, first=self.operation)
        return made
