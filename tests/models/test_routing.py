"""Native choices of experts against the code of routers, which they replace."""

import pytest
import torch
from torch import Tensor, fx, nn

from neo_desktop.models.traced import routing
from neo_desktop.models.traced.routing import Routing


class _Router(nn.Module):
    """The choice of `per_token` experts, in the form of transformers."""

    def __init__(self, experts: int, per_token: int, *, is_sigmoid: bool, has_bias: bool) -> None:
        super().__init__()
        self.per_token, self.is_sigmoid = per_token, is_sigmoid
        generator = torch.Generator().manual_seed(1)
        self.register_buffer("bias", torch.rand(experts, generator=generator) * 0.3 * has_bias)

    def forward(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        wide = logits.float()
        scores = wide.sigmoid() if self.is_sigmoid else wide.softmax(-1)
        ids = torch.topk(scores + self.bias, self.per_token, dim=-1)[1]
        weights = scores.gather(1, ids)
        return ids, weights / (weights.sum(-1, keepdim=True) + 1e-20)


def routing_of(router: _Router) -> Routing:
    code = fx.symbolic_trace(router)  # type: ignore[no-untyped-call]
    return Routing(next(iter(code.graph.nodes)), frozenset(), code)


@pytest.mark.parametrize(("experts", "per_token"), [(4, 1), (8, 1), (5, 2), (128, 8)])
@pytest.mark.parametrize("is_sigmoid", [True, False])
def test_biases_count_where_scores_are_close(experts: int, per_token: int, is_sigmoid: bool) -> None:
    """The native call, if one is chosen, takes the experts that the code takes."""
    router = _Router(experts, per_token, is_sigmoid=is_sigmoid, has_bias=True)
    logits = torch.randn(500, experts, generator=torch.Generator().manual_seed(2))
    ids, weights = torch.empty(500, per_token, dtype=torch.int32), torch.empty(500, per_token)
    routing_of(router).choose(experts, torch.float32)(logits, ids, weights)
    expected, shares = router(logits)
    order, ours = expected.argsort(dim=1), ids.argsort(dim=1)
    assert torch.equal(ids.gather(1, ours).long(), expected.gather(1, order))
    torch.testing.assert_close(weights.gather(1, ours), shares.gather(1, order))


@pytest.mark.parametrize("experts", [128, 512])
def test_many_experts_are_chosen_natively_from_16_bits(experts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(routing, "_computed")  # the code itself would be the choice
    router = _Router(experts, 8, is_sigmoid=False, has_bias=False)
    routing_of(router).choose(experts, torch.bfloat16)
