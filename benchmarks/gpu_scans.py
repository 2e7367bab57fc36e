"""Times scans of recurrent layers on a GPU, in chunks and token by token, and compares their results.

`scripts/gpu_check.py` runs it with the other kernels. Alone: python -m benchmarks.gpu_scans
"""

from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import normalize

from benchmarks.gpu_kernels import TOLERANCE, elapsed_ms
from benchmarks.recurrent import SHAPES
from neo_desktop.engine.kernels.in_triton.chunked_scan import scan_chunks
from neo_desktop.engine.kernels.in_triton.recurrent import scan_tokens
from neo_desktop.models.recurrent import Spans

# Requests, tokens per request.
PROMPTS = ((1, 16), (1, 32), (1, 64), (1, 256), (1, 1024), (1, 4096), (8, 512))


def error_of(found: Tensor, expected: Tensor) -> float:
    """Return the relative error of a tensor as one vector."""
    return float((found - expected).norm() / expected.norm())


def check_scans() -> None:
    """Compare both kernels for prompts of several lengths, and print their times.

    Raises:
        AssertionError: their results differ; all have run.
    """
    torch.manual_seed(0)
    wrong: list[str] = []
    device = torch.device("cuda")
    for name, (key_heads, heads, key_dim, value_dim, is_delta) in SHAPES.items():
        for requests, tokens in PROMPTS:
            rows = requests * tokens
            q, k = (normalize(torch.randn(rows, key_heads, key_dim, device=device), dim=-1) for _ in "qk")
            v = torch.randn(rows, heads, value_dim, device=device)
            decay, beta = torch.rand(2, rows, heads, device=device)
            decay = -0.1 * decay
            first = torch.arange(0, rows, tokens, dtype=torch.int32)
            source = torch.arange(requests, dtype=torch.int32)
            table = torch.stack([first, first + tokens, source, source + requests], 1).to(device)
            spans = Spans(table, tokens)
            state = torch.randn(2 * requests + 1, heads, key_dim, value_dim, device=device)
            outs, states = torch.zeros(2, *v.shape, device=device), torch.stack([state, state])
            steps, chunks = (
                partial(
                    scan, q, k, v, decay, beta, states[way], spans=spans, out=outs[way], is_delta=is_delta
                )
                for way, scan in enumerate((scan_tokens, scan_chunks))
            )
            steps()
            chunks()
            what = f"scan of {requests} x {tokens} tokens, {name}"
            error = max(error_of(outs[1], outs[0]), error_of(states[1], states[0]))
            if not error <= TOLERANCE[torch.float32]:
                wrong.append(f"{what}: relative error {error:.1e}")
            steps_ms, chunks_ms = elapsed_ms(steps), elapsed_ms(chunks)
            print(
                f"kernel float32, {what}: token by token {1000 * steps_ms:.0f} us, "
                f"in chunks {1000 * chunks_ms:.0f} us, {steps_ms / chunks_ms:.2f}x"
            )
    assert not wrong, f"{len(wrong)} scans differ: {'; '.join(wrong)}"


if __name__ == "__main__":
    check_scans()
