"""Program for the imitated GPU: engines whose kernels run as compiled give the CPU's greedy tokens.

    TRITON_INTERPRET=0 scripts/imitated_gpu.sh --run -m ptx.engine MODEL …

It prints a line of JSON per model and policy: kernel → launches.
"""

import json
import sys

import imitated_gpu
import torch
from cost_models import machine
from fallback_levels import kernels_on

from neo_desktop import Engine, SamplingParams
from neo_desktop.engine.options import EngineOptions

from .driver import ImitatedGPU

PROMPTS = [[(7 * i + 3 * j) % 257 for j in range(size)] for i, size in enumerate((5, 19, 12))]
GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
GPU_CACHE_TOKENS = {"gpu-only": 256, "neo": 32}  # NEO's other requests must live in host memory


def check(model: str, policy: str, expected: list[tuple[int, ...]]) -> None:
    options = EngineOptions(
        model=model,
        device="cuda",
        dtype="float16",
        policy=policy,
        gpu_cache_tokens=GPU_CACHE_TOKENS[policy],
        cpu_cache_tokens=256,
        max_batch_tokens=64,
        max_batch_requests=4,
        disk_cache_gib=0.0,
    )
    with Engine.from_options(options, machine(num_layers=2)) as engine:
        found = [output.token_ids for output in engine.generate(PROMPTS, GREEDY)]
        num_cpu_decodes = engine.stats().num_cpu_decodes
    assert found == expected, (policy, found, expected)
    assert (num_cpu_decodes > 0) == (policy == "neo"), num_cpu_decodes


def main() -> None:
    major, minor = torch.cuda.get_device_capability()
    gpu = ImitatedGPU(10 * major + minor)
    gpu.submit = imitated_gpu.enqueue
    gpu.install()
    for model in sys.argv[1:]:
        with Engine.from_pretrained(model, device="cpu", dtype="float32", disk_cache_gib=0.0) as engine:
            expected = [output.token_ids for output in engine.generate(PROMPTS, GREEDY)]
        for policy in GPU_CACHE_TOKENS:
            gpu.launches.clear()
            with kernels_on("triton"):
                check(model, policy, expected)
            print(json.dumps(gpu.launches), flush=True)


if __name__ == "__main__":
    main()
