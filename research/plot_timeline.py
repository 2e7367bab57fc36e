"""Draw the use of GPU and CPU in one iteration of a recorded trace, and over a simulated run.

    neo-desktop serve --policy neo --trace-timeline trace.json      # and some requests
    python -m research.plot_timeline trace trace.json --iteration 40 --layers 4 8
    python -m research.plot_timeline run

Pictures go to --out.
"""

import argparse
import json
from pathlib import Path

import matplotlib as mpl
import torch

from neo_desktop.engine.kv.cache import KVCache
from neo_desktop.engine.kv.layout import BLOCK_SIZE
from neo_desktop.engine.kv_tier import KVTier
from neo_desktop.engine.schedule.batch_builder import SchedulerLimits
from neo_desktop.engine.schedule.policies import POLICIES
from neo_desktop.engine.schedule.scheduler import Scheduler
from neo_desktop.engine.simulation.analytic import analytic_cost_model
from neo_desktop.engine.simulation.presets import get_gpu, get_host
from neo_desktop.engine.simulation.simulator import SimulatedRequest
from neo_desktop.engine.simulation.workload import synthetic
from neo_desktop.models.shapes import shape

mpl.use("Agg")
import matplotlib.pyplot as plt

LANES = ("device", "to-host", "cpu", "to-device", "swap")
SUB_BATCH_COLOURS = {-1: "#bbbbbb", 0: "#2f6fb0", 1: "#d08700"}
GPU_CACHE_TOKENS, CPU_CACHE_TOKENS = 1008, 64_000
WINDOW_MS = 1000.0  # averaging window of the busy shares


def draw_trace(file: Path, iteration: int, layers: tuple[int, int], out: Path) -> None:
    """Draw a few layers of one iteration: a row per lane, coloured by sub-batch."""
    events = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
    spans = [
        event
        for event in events
        if event["ph"] == "X"
        and event["args"]["iteration"] == iteration
        and layers[0] <= event["args"]["layer"] < layers[1]
    ]
    if not spans:
        raise SystemExit(f"{file} has no iteration {iteration} with layers {layers[0]} to {layers[1] - 1}")
    begin = min(span["ts"] for span in spans)
    figure, axes = plt.subplots(figsize=(10, 2.6), layout="constrained")
    for span in spans:
        axes.barh(
            LANES.index(span["cat"]),
            span["dur"] / 1e3,
            left=(span["ts"] - begin) / 1e3,
            height=0.7,
            color=SUB_BATCH_COLOURS[span["args"]["sub_batch"]],
            edgecolor="white",
            linewidth=0.5,
        )
    axes.set_yticks(range(len(LANES)), LANES)
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    handles = [plt.Rectangle((0, 0), 1, 1, color=SUB_BATCH_COLOURS[i]) for i in (0, 1)]
    axes.legend(handles, ["sub-batch 0", "sub-batch 1"], loc="upper right", fontsize="small")
    figure.savefig(out / "timeline-iteration.png", dpi=110)


def simulate_run(policy_name: str) -> list[tuple[float, float, float, float, int, int]]:
    """Return, per iteration: start and duration, CPU and GPU attention time, waiting prompts and decodes."""
    gpu, config = get_gpu("t4"), shape("llama-2-7b")
    cost = analytic_cost_model(gpu, get_host(gpu.host), config, torch.float16)
    policy = POLICIES[policy_name]
    tokens = {KVTier.DEVICE: GPU_CACHE_TOKENS, KVTier.HOST: CPU_CACHE_TOKENS}
    kv_cache = KVCache({tier: tokens.get(tier, 0) // BLOCK_SIZE for tier in policy.tiers}, BLOCK_SIZE)
    scheduler: Scheduler[SimulatedRequest] = Scheduler(kv_cache, policy, SchedulerLimits(2048, 256), cost)
    queues = scheduler.queues
    for ordinal, lengths in enumerate(synthetic(100, 372, 45)):
        queues.waiting.append(SimulatedRequest(ordinal, lengths))
    rows, clock_ms = [], 0.0
    while (decision := scheduler.decide()) is not None:
        num_chunk_tokens = sum(n for batch in decision.sub_batches for _, n in batch if n > 1)
        rows.append(
            (
                clock_ms,
                decision.predicted.total_ms,
                decision.predicted.host_attention_ms,
                float(num_chunk_tokens),
                len(queues.waiting),
                len(decision.waiting_decodes),
            )
        )
        clock_ms += decision.predicted.total_ms
        for request in scheduler.advance(decision):
            if request.is_complete:
                queues.remove(request)
    return rows


def draw_run(out: Path) -> None:
    """Draw the CPU's utilisation over a run, with a line at the last prompt."""
    figure, axes = plt.subplots(figsize=(10, 3.2), layout="constrained")
    for name, colour in (("neo", "#2f6fb0"), ("auto", "#1c8c4c")):
        rows = simulate_run(name)
        end_ms = rows[-1][0] + rows[-1][1]
        prompts_end_ms = max(start + duration for start, duration, _, chunk, *_ in rows if chunk)
        times, shares = [], []
        time_ms = 0.0
        while time_ms < end_ms:
            inside = [row for row in rows if time_ms <= row[0] < time_ms + WINDOW_MS]
            if inside:
                times.append(time_ms / 1e3)
                shares.append(100 * sum(row[2] for row in inside) / sum(row[1] for row in inside))
            time_ms += WINDOW_MS
        axes.plot(
            times, shares, color=colour, label=f"{name}: {end_ms / 1e3:.0f} s in all", drawstyle="steps-post"
        )
        axes.axvline(prompts_end_ms / 1e3, color=colour, linestyle=":", linewidth=1)
        idle = [row for row in rows if row[0] >= prompts_end_ms and row[5] and not row[2]]
        print(
            f"{name}: {end_ms / 1e3:.1f} s, last prompt in at {prompts_end_ms / 1e3:.1f} s; afterwards "
            f"{len(idle)} iterations ({sum(row[1] for row in idle):.0f} ms) without CPU decodes, some waiting"
        )
    axes.set_ylim(0, 105)
    axes.set_xlabel("s")
    axes.set_ylabel("CPU busy, %")
    axes.legend(loc="upper left", title="dotted: all prompts are in")
    figure.savefig(out / "timeline-run.png", dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    commands = parser.add_subparsers(required=True)
    trace = commands.add_parser("trace", help="one iteration of a trace")
    trace.add_argument("file", type=Path)
    trace.add_argument("--iteration", type=int, required=True)
    trace.add_argument("--layers", type=int, nargs=2, default=(0, 4))
    trace.set_defaults(draw=lambda o: draw_trace(o.file, o.iteration, tuple(o.layers), o.out))
    commands.add_parser("run", help="a simulated run").set_defaults(draw=lambda o: draw_run(o.out))
    options = parser.parse_args()
    options.draw(options)


if __name__ == "__main__":
    main()
