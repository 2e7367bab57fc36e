"""What attention should answer: plain float64."""

from torch import Tensor


def relative_error(out: Tensor, q: Tensor, k: Tensor, v: Tensor) -> float:
    """Return the error of the worst of the query heads that share a KV head.

    Args:
        out: [heads, head_dim], what is judged.
        q: [heads, head_dim].
        k: [tokens, head_dim].
        v: [tokens, head_dim].
    """
    scores = q.double() @ k.double().T * q.shape[-1] ** -0.5
    expected = scores.softmax(-1) @ v.double()
    return float(((out.double() - expected).norm(dim=-1) / expected.norm(dim=-1)).max())
