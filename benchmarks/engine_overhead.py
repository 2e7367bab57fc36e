"""The engine's own time per iteration: planning, starting, reading tokens, bookkeeping, text.

The device waits for these. Preparing the next iteration and text overlap the device (--unprepared: nothing is
prepared). With a stop string (--stop) a token's text is made at once.

    python -m benchmarks.engine_overhead --requests 64 --context 400 8000 --on-cpu 0 48

The engine is real, except that the model's layers, which would be a CUDA graph, do nothing. Times are
processor times of the engine's thread: the minimum and the median of many iterations. A pause (--pause-ms)
replaces the model; after it the processor's caches hold less of the engine's data than in a tight loop.
Predictions are those for a desktop from its datasheet.
"""

import argparse
import random
import statistics
import time
from dataclasses import replace

import torch

from neo_desktop.engine.batch import IterationResult, SampledToken
from neo_desktop.engine.detokenizer import IncrementalText
from neo_desktop.engine.execute.backend import ThreadBackend
from neo_desktop.engine.execute.graphs import AnyProgram, sections
from neo_desktop.engine.execute.layout import Capacity
from neo_desktop.engine.execute.model_runner import ModelRunner
from neo_desktop.engine.fallbacks import fallbacks
from neo_desktop.engine.kernels import dispatch
from neo_desktop.engine.kv.cache import KVCache
from neo_desktop.engine.kv.device_layer import DeviceLayer
from neo_desktop.engine.kv.layout import BLOCK_SIZE
from neo_desktop.engine.kv.storage import KVPool, KVStorage
from neo_desktop.engine.kv_tier import MEASURED_TIERS, KVTier
from neo_desktop.engine.loading import model_path
from neo_desktop.engine.options import BUILTIN
from neo_desktop.engine.request import Request
from neo_desktop.engine.sampling_params import SamplingParams
from neo_desktop.engine.schedule.policies import Halves, Policy, get_policy
from neo_desktop.engine.schedule.scheduler import Scheduler, SchedulerLimits
from neo_desktop.engine.simulation.analytic import analytic_cost_model
from neo_desktop.engine.simulation.presets import GPUS, HOSTS
from neo_desktop.models.registry import random_model, stages_of
from neo_desktop.models.shapes import shape
from neo_desktop.models.tokenizer import Tokenizer

ITERATIONS = 200
OUTPUT_TOKENS = 1000  # per request; more than the run generates
NUM_LAYERS = 28
PARTS = ("plan", "start", "result", "book")  # between two iterations
BESIDE = ("prepare next", "text")


class WithoutLayers(ThreadBackend):
    """A backend whose graphs do nothing; the steps between them are carried out."""

    def start(self, program: AnyProgram, *, with_flags: bool, with_graphs: bool) -> bool:
        assert program.key is not None
        for is_graph, steps in sections(program):
            for step in () if is_graph else steps:
                step.submit(self._lanes)
        return False


class Rig:
    """A scheduler and a model runner with requests of random lengths around a mean.

    Args:
        num_on_cpu: requests whose KV does not fit on the device; the CPU attends to them in two sub-batches.
            0: the policy decides, with room on the device for all.
    """

    def __init__(self, options: argparse.Namespace, context: int, num_on_cpu: int) -> None:
        rng, num_requests = random.Random(0), options.requests
        lengths = [rng.randint(context // 2, context * 3 // 2) for _ in range(num_requests)]
        blocks = [-(-(length + OUTPUT_TOKENS) // BLOCK_SIZE) for length in lengths]
        spare = num_requests**2  # left free by admission
        policy: Policy = get_policy("gpu-only")
        sizes = {KVTier.DEVICE: sum(blocks) + spare}
        if num_on_cpu:
            policy = Halves("halves", MEASURED_TIERS)
            sizes = {KVTier.DEVICE: sum(blocks[num_on_cpu:]), KVTier.HOST: sum(blocks) + spare}
        config = replace(shape("tiny"), num_layers=NUM_LAYERS, layer_windows=(None,) * NUM_LAYERS)
        config = replace(config, max_context_tokens=2 * (context + OUTPUT_TOKENS))
        model = random_model(config, dtype=torch.float32, device=torch.device("cpu"))
        layers = [0] * NUM_LAYERS  # share their memory
        kinds = {KVTier.DEVICE: DeviceLayer, KVTier.HOST: None}
        storage = KVStorage(
            {
                tier: KVPool(config, n, BLOCK_SIZE, model.dtype, model.device, kinds[tier], None, layers)
                for tier, n in sizes.items()
            }
        )
        capacity = Capacity.of(512, num_requests, config.max_context_tokens, BLOCK_SIZE)
        backend = WithoutLayers(None)
        self.runner = ModelRunner(stages_of(model, dispatch), storage, capacity, backend, uses_gpu=True)
        predicted = shape("llama-3.2-3b")
        cost = analytic_cost_model(GPUS["rtx-4090"], HOSTS["ddr5-desktop"], predicted, torch.float16)
        limits = SchedulerLimits(8192, num_requests)
        self.scheduler: Scheduler[Request] = Scheduler(KVCache(sizes, BLOCK_SIZE), policy, limits, cost)
        tokenizer = Tokenizer.from_pretrained(model_path(BUILTIN))
        params = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=options.temperature)
        for number, length in enumerate(lengths):
            self.scheduler.add(
                Request(
                    str(number),
                    tuple(rng.choices(range(256), k=length)),
                    params,
                    choice=0,
                    seed=number,
                    arrival=number,
                    max_context_tokens=length + OUTPUT_TOKENS,
                    eos_token_ids=(),
                    text=IncrementalText(tokenizer.decode_stream(), options.stop),
                )
            )

    def prefill(self) -> None:
        """Schedule the prompts, without the model runner."""
        has_prompts = True
        while has_prompts:
            plan = self.scheduler.schedule()
            assert plan is not None
            has_prompts = any(not each.is_decode for each in plan.sequences)
            sampled = {each.request_id: SampledToken(0) for each in plan.sequences if each.sampling}
            self.scheduler.update(IterationResult(sampled, {}))

    def step(self, pause_ms: float, *, prepares: bool) -> dict[str, float]:
        """Run an iteration; return the durations of PARTS and BESIDE, in ms."""
        times_ms, last_s = dict[str, float](), time.thread_time()

        def end(part: str) -> None:
            nonlocal last_s
            now_s = time.thread_time()
            times_ms[part], last_s = (now_s - last_s) * 1e3, now_s

        plan = self.scheduler.schedule()
        assert plan is not None
        end("plan")
        wait = self.runner.start(plan)
        end("start")
        following = self.scheduler.look_ahead(may_plan=prepares)
        if following is not None:
            self.runner.prepare(following)
        end("prepare next")
        time.sleep(pause_ms / 1e3)
        end("pause")
        result = wait()
        end("result")
        gained = self.scheduler.update(result)
        end("book")
        for request in gained:
            request.take_output()
        end("text")
        return times_ms


def measure(options: argparse.Namespace, context: int, num_on_cpu: int) -> None:
    """Decode; print minima and medians."""
    rig = Rig(options, context, num_on_cpu)
    rig.prefill()
    times = [rig.step(options.pause_ms, prepares=not options.unprepared) for _ in range(ITERATIONS)]
    sums = [sum(each[part] for part in PARTS) for each in times]
    columns = [sums, *([each[part] for each in times] for part in (*PARTS, *BESIDE))]
    cells = "".join(f"{f'{min(each):.3f} {statistics.median(each):.3f}':>14}" for each in columns)
    print(f"{context:8}{num_on_cpu:8}{cells}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--context", type=int, nargs="+", default=[400, 8000], help="tokens, mean")
    parser.add_argument("--on-cpu", type=int, nargs="+", default=[0, 48], help="requests on the CPU")
    parser.add_argument("--pause-ms", type=float, default=0.0, help="in place of the model")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--unprepared", action="store_true", help="prepare nothing ahead")
    parser.add_argument("--stop", nargs="+", default=[], help="stop strings of all requests")
    options = parser.parse_args()
    torch.set_num_threads(1)
    fallbacks.limit("graphs", "device-only", "the layers do nothing", is_told=True)
    print(f"{'context':>8}{'on CPU':>8}" + "".join(f"{part:>14}" for part in ("sum, ms", *PARTS, *BESIDE)))
    for context in options.context:
        for num_on_cpu in options.on_cpu:
            measure(options, context, num_on_cpu)


if __name__ == "__main__":
    main()
