"""Streamed KV without a GPU: device and bus take stated times, in the engine's own pipeline.

    python -m research.swap_pipeline

The built-in model answers some requests at once under policy `pie`, on threads as without a GPU. Lanes are
throttled: the device's stages of a layer, and the copies of a layer's KV, end after the stated time, which
exceeds their real time. So tokens are real, and times are not those of a GPU; they include communication
between the threads. Iterations are compared with their predictions, and the streamed KV with the bus's
capacity in the time of a layer. The engine learns that capacity: its tables know only the stated rates, and
with `--believed` unlike `--bus` not even these.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from neo_desktop.engine.batch import IterationPlan, IterationTiming
from neo_desktop.engine.engine import Engine
from neo_desktop.engine.execute.backend import open_backend
from neo_desktop.engine.execute.executor import Executor, Wait
from neo_desktop.engine.execute.layout import Capacity
from neo_desktop.engine.execute.model_runner import ModelRunner
from neo_desktop.engine.kv.cache import KVCache
from neo_desktop.engine.kv.layout import BLOCK_SIZE
from neo_desktop.engine.kv.streamed import BlockRun, StreamedPool
from neo_desktop.engine.kv_tier import ALL_TIERS
from neo_desktop.engine.loading import load
from neo_desktop.engine.options import BUILTIN, EngineOptions
from neo_desktop.engine.predict.corrected import CorrectedCostModel
from neo_desktop.engine.predict.cost_model import Curve, Surface, TableCostModel
from neo_desktop.engine.sampling_params import SamplingParams
from neo_desktop.engine.schedule.policies import get_policy
from neo_desktop.engine.schedule.scheduler import Scheduler
from neo_desktop.engine.setup import EngineParts, take_memory
from neo_desktop.models.operators import Store
from neo_desktop.models.stages import Stages
from neo_desktop.models.state import State

POLICY = "pie"
MOST = 4096  # tokens, in tables


def throttled(work: Callable[[], object], seconds: float) -> None:
    """Run work that ends after this time."""
    end = time.perf_counter() + seconds
    work()
    time.sleep(max(end - time.perf_counter(), 0.0))


class ThrottledStages(Stages):
    """Stages between attention that take a stated time for any number of rows."""

    layer_s = 0.0

    def advance(
        self, finished: int | None, begun: int | None, state: State, store: Store | None = None
    ) -> None:
        throttled(partial(super().advance, finished, begun, state, store), self.layer_s)


@dataclass(frozen=True)
class Rates:
    """Rates of device and bus."""

    layer_ms: float
    bus_bytes_per_s: float

    def hidden_tokens(self, token_bytes: float) -> float:
        """Return the tokens whose KV the bus brings in the time of a layer."""
        return self.layer_ms / 1e3 * self.bus_bytes_per_s / token_bytes

    def tables(self, num_layers: int, token_bytes: float) -> TableCostModel:
        """Return the cost model of a scheduler that knows these rates.

        Args:
            token_bytes: KV bytes per token and layer.
        """
        nothing = Surface((1, 2), (1, MOST), [[0.0, 0.0], [0.0, 0.0]])
        copies = Curve((1, MOST), [1e3 * tokens * token_bytes / self.bus_bytes_per_s for tokens in (1, MOST)])
        return TableCostModel(
            num_layers=num_layers,
            overlaps=True,
            iteration_ms=0.0,
            linear=Curve((1, MOST), [self.layer_ms] * 2),
            head=Curve((1, MOST), [0.0] * 2),
            offload=Curve((1, MOST), [0.0] * 2),
            transfer=copies,
            swap=copies,
            first_chunk_attention=Curve((1, MOST), [0.0] * 2),
            later_chunk_attention=nothing,
            attention={tier.as_attended: nothing for tier in ALL_TIERS},
        )


@dataclass(frozen=True)
class Iteration:
    """Prediction and duration of one iteration."""

    predicted: IterationTiming
    measured: IterationTiming


class Watched(Executor):
    """Records iteration times."""

    def __init__(self, executor: ModelRunner) -> None:
        self._executor = executor
        self.iterations: list[Iteration] = []

    def start(self, plan: IterationPlan) -> Wait:
        """Start a plan; see `Executor`."""
        wait = self._executor.start(plan)

        def and_note() -> object:
            result = wait()
            if result.timing is not None:
                self.iterations.append(Iteration(plan.predicted, result.timing))
            return result

        return and_note  # type: ignore[return-value]

    def give_up(self) -> None:
        self._executor.give_up()

    def close(self) -> None:
        self._executor.close()


def engine_of(parts: EngineParts, true: Rates, believed: Rates) -> tuple[Engine, Watched]:
    """Return an engine whose device and bus take the stated times."""
    decoder, storage, limits = parts.model.decoder, parts.storage, parts.limits
    config = decoder.config
    (streamed,) = (pool for tier in storage.tiers if isinstance(pool := storage[tier], StreamedPool))
    token_bytes = config.kv_bytes_per_token(decoder.dtype) / config.num_layers
    bring = streamed.bring

    def bring_in_time(layer: int, runs: Sequence[BlockRun]) -> None:
        tokens = sum(run.num_blocks for run in runs) * BLOCK_SIZE
        throttled(partial(bring, layer, runs), tokens * token_bytes / true.bus_bytes_per_s)

    streamed.bridged_bytes = 0  # on this slow bus a gap takes longer than another copy
    streamed.bring = bring_in_time  # type: ignore[method-assign]
    stages = ThrottledStages(decoder)
    stages.layer_s = true.layer_ms / 1e3
    kv_cache = KVCache(parts.num_blocks, BLOCK_SIZE)
    capacity = Capacity.of(
        limits.max_batch_tokens, limits.max_batch_requests, config.max_context_tokens, BLOCK_SIZE
    )
    watched = Watched(ModelRunner(stages, storage, capacity, open_backend(parts.model.streams)))
    cost = CorrectedCostModel.of(believed.tables(config.num_layers, token_bytes))
    scheduler = Scheduler(kv_cache, get_policy(POLICY), limits, cost, config.num_layers)
    return Engine(parts.model, scheduler, kv_cache, watched, POLICY, cost), watched


def prompts(count: int, tokens: int) -> Sequence[list[int]]:
    """Return prompts without common prefixes."""
    generator = torch.Generator().manual_seed(0)
    numbers: Tensor = torch.randint(3, 250, (count, tokens), generator=generator)
    return [row.tolist() for row in numbers]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--layer-ms", type=float, default=10.0, help="of the device, for a layer")
    parser.add_argument("--bus", nargs="+", type=float, default=[20.0, 40.0, 80.0], help="MB/s")
    parser.add_argument("--believed", type=float, help="MB/s, by the tables; default: what it is")
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--output", type=int, default=100, help="tokens of each")
    parser.add_argument("--warm-up", type=int, default=50, help="iterations that are not counted")
    options = parser.parse_args()
    engine_options = EngineOptions(
        model=BUILTIN,
        device="cpu",
        dtype="float32",
        policy=POLICY,
        gpu_cache_tokens=512,
        max_batch_tokens=256,
        max_batch_requests=32,
    )
    model = load(engine_options)
    asked = prompts(options.requests, 60)
    params = SamplingParams(max_tokens=options.output, temperature=0.0, ignore_eos=True)
    print(
        f"{model.config.num_layers} layers of {options.layer_ms:g} ms\n"
        "| bus, MB/s | iterations | of them with copies | measured, ms | predicted / measured: median, and "
        "80 % of them | waits for copies | tokens brought to a layer | hidden at most |\n" + "|---" * 8 + "|",
        flush=True,
    )
    token_bytes = model.config.kv_bytes_per_token(model.decoder.dtype) / model.config.num_layers
    tokens_before: object = None
    for bus in options.bus:
        true = Rates(options.layer_ms, bus * 1e6)
        believed = Rates(options.layer_ms, (options.believed or bus) * 1e6)
        # The size that is planned on a GPU: tokens that the bus is believed to bring in the time of a layer.
        size = int(believed.hidden_tokens(token_bytes)) // BLOCK_SIZE * BLOCK_SIZE
        parts = take_memory(model, replace(engine_options, swap_cache_tokens=size))
        engine, watched = engine_of(parts, true, believed)
        with engine:
            tokens = [output.token_ids for output in engine.generate(asked, params)]
        if tokens_before not in (None, tokens):
            raise SystemExit("the tokens depend on the speed of the bus")
        tokens_before = tokens
        settled = watched.iterations[options.warm_up :]
        with_copies = [each for each in settled if each.measured.copied_tokens]
        if not with_copies:
            raise SystemExit(f"with {bus:g} MB/s no KV came: give more requests, or longer ones")
        ratios = sorted(each.predicted.total_ms / each.measured.total_ms for each in with_copies)
        tenth = len(ratios) // 10
        waits_ms = sum(each.measured.copy_wait_ms for each in settled)
        print(
            f"| {bus:g} | {len(settled)} | {len(with_copies)} "
            f"| {statistics.median(each.measured.total_ms for each in with_copies):.1f} "
            f"| {statistics.median(ratios):.2f}, {ratios[tenth]:.2f} to {ratios[-1 - tenth]:.2f} "
            f"| {waits_ms / sum(each.measured.total_ms for each in settled):.1%} "
            f"| {statistics.median(each.measured.copied_tokens for each in with_copies):.0f} "
            f"| {true.hidden_tokens(token_bytes):.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
