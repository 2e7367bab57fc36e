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
from neo_desktop.engine.generate import Completion
from neo_desktop.engine.options import EngineOptions

from .driver import ImitatedGPU

SIZES = (5, 19, 12)  # of prompts
CANDIDATES = [[(7 * i + 3 * j) % 257 for j in range(size)] for size in SIZES for i in range(80)]
GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, logprobs=2)
CLEAR = 0.3  # a lead in log-probability that the rounding of inputs to 8 bits does not turn
GPU_CACHE_TOKENS = {"gpu-only": 256, "neo": 32}  # NEO's other requests must live in host memory


def lead(answer: Completion) -> float:
    """Return the least lead in log-probability of a greedy token over the second one."""
    tops = [token.top_logprobs for token in answer.tokens]
    return min(first.logprob - second.logprob for first, second, *_ in tops)


def clear_answers(model: str) -> list[tuple[list[int], tuple[int, ...]]]:
    """Return a prompt of each size and the CPU's tokens; of all candidates, those with the clearest lead."""
    with Engine.from_pretrained(model, device="cpu", dtype="float32", disk_cache_gib=0.0) as engine:
        answers = list(zip(CANDIDATES, engine.generate(CANDIDATES, GREEDY), strict=True))
    best = [
        max((each for each in answers if len(each[0]) == n), key=lambda each: lead(each[1])) for n in SIZES
    ]
    assert min(lead(answer) for _, answer in best) > CLEAR
    return [(prompt, answer.token_ids) for prompt, answer in best]


def check(model: str, policy: str, answers: list[tuple[list[int], tuple[int, ...]]]) -> None:
    options = EngineOptions(
        model=model,
        device="cuda",
        dtype="float16",
        policy=policy,
        gpu_cache_tokens=GPU_CACHE_TOKENS[policy],
        cpu_cache_tokens=None if policy == "gpu-only" else 256,
        max_batch_tokens=64,
        max_batch_requests=4,
        disk_cache_gib=0.0,
    )
    prompts, expected = zip(*answers, strict=True)
    with Engine.from_options(options, machine(num_layers=2)) as engine:
        found = tuple(answer.token_ids for answer in engine.generate(prompts, GREEDY))
        num_cpu_decodes = engine.stats().num_cpu_decodes
    assert found == expected, (policy, found, expected)
    assert (num_cpu_decodes > 0) == (policy == "neo"), num_cpu_decodes


def main() -> None:
    major, minor = torch.cuda.get_device_capability()
    gpu = ImitatedGPU(10 * major + minor)
    gpu.submit = imitated_gpu.enqueue
    gpu.install()
    for model in sys.argv[1:]:
        answers = clear_answers(model)
        for policy in GPU_CACHE_TOKENS:
            gpu.launches.clear()
            with kernels_on("triton"):
                check(model, policy, answers)
            print(json.dumps(gpu.launches), flush=True)


if __name__ == "__main__":
    main()
