"""Times one-step updates of recurrent states on the CPU beside plain reads and copies of the same bytes.

python -m benchmarks.recurrent [THREADS]
"""

import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from neo_desktop import native

LAYERS = 24
REPEATS = 5
PROMPT = 128  # tokens
SHAPES = {  # key_heads, heads, key_dim, value_dim, Gated DeltaNet
    "Qwen3.5 (Gated DeltaNet)": (16, 32, 128, 128, True),
    "Nemotron-3 (Mamba-2)": (8, 64, 128, 64, False),
}


def best_s(work: Callable[[], object]) -> float:
    """Return the shortest of some durations."""
    durations = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        work()
        durations.append(time.perf_counter() - start)
    return min(durations)


def measure(name: str, threads: int) -> None:
    """Print the times of one shape."""
    key_heads, heads, key_dim, value_dim, is_delta = SHAPES[name]
    states = torch.randn(LAYERS, 1, heads, key_dim, value_dim)
    copy = torch.empty_like(states)

    def rows(tokens: int) -> list[Tensor]:
        q, k = (torch.randn(tokens, key_heads, key_dim) * 0.1 for _ in "qk")
        return [q, k, torch.randn(tokens, heads, value_dim), *(-torch.rand(2, tokens, heads))]

    def scan(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor
    ) -> None:
        spans = torch.tensor([[0, len(q), 0, 0]], dtype=torch.int32)
        for state in states:
            native.scan_state(q, k, v, decay, -beta, state, spans, v.clone(), threads, is_delta=is_delta)

    one, prompt = rows(1), rows(PROMPT)
    update_s, prompt_s = best_s(lambda: scan(*one)), best_s(lambda: scan(*prompt)) / PROMPT / LAYERS
    read_s = min(native.read_seconds(states.view(-1), threads) for _ in range(REPEATS))
    copy_s = best_s(lambda: copy.copy_(states))
    print(f"{name}: {states.nbytes / 2**20:.0f} MiB of states in {LAYERS} layers, {threads} threads")
    times = f"a plain read {1e3 * read_s:.2f} ms, a plain copy {1e3 * copy_s:.2f} ms"
    print(f"  one token {1e3 * update_s:.2f} ms; {times}")
    print(f"  a prompt of {PROMPT}: {1e6 * prompt_s:.1f} µs per token and layer")


def main(threads: int) -> None:
    torch.set_num_threads(threads)
    for name in SHAPES:
        measure(name, threads)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else native.default_num_threads())
