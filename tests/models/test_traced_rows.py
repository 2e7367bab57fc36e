"""Changes to the graph of a `transformers` model before it is cut into stages."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from traced_models import EXPERTS, FAMILIES, SIZES
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from neo_desktop.models.json_file import ModelError
from neo_desktop.models.traced.capture import CannotCutError
from neo_desktop.models.traced.config import read_traced
from neo_desktop.models.traced.graph import clean
from neo_desktop.models.traced.rows import check_rows, name_of

Code = Callable[[Tensor], Tensor]


class _Module(nn.Module):
    def __init__(self, code: Code) -> None:
        super().__init__()
        self.code = code

    def forward(self, x: Tensor) -> Tensor:
        return self.code(x)


def cleaned(code: Code) -> fx.GraphModule:
    """Return the exported and cleaned graph of code on x [1, rows, 8], as it enters the cut."""
    program = torch.export.export(
        _Module(code), (torch.randn(1, 5, 8),), dynamic_shapes=({1: torch.export.Dim.DYNAMIC},), strict=False
    )
    graph: fx.Graph = program.graph
    clean(graph)
    return fx.GraphModule(nn.Module(), graph)


def written_in_slices(x: Tensor) -> Tensor:
    together = x.new_empty(*x.shape[:-1], 12)
    together[..., :4] = x[..., 4:]
    together[..., 4:] = x * 2
    return together.sin()


def written_twice(x: Tensor) -> Tensor:
    """Write in place to two of three equal tensors."""
    (_, best), (_, worst) = x.topk(2, dim=-1), x.topk(2, dim=-1, largest=False)
    one = torch.zeros_like(x).scatter_(-1, best, 1.0)
    other = torch.zeros_like(x).scatter_(-1, worst, 3.0)
    return one + other + torch.zeros_like(x)


def added_in_place(x: Tensor) -> Tensor:
    one, other = x * 2, x * 2
    one.add_(1)
    one.add_(1)
    return one - other


def written_under_other_names(x: Tensor) -> Tensor:
    one = x * 2
    one[..., :4].mul_(3)
    one.to(one.dtype).add_(1)
    one.contiguous().sub_(x)
    return one


@pytest.mark.parametrize(
    "code", [written_in_slices, written_twice, added_in_place, written_under_other_names]
)
def test_memory_that_is_written_to_keeps_its_meaning(code: Code) -> None:
    module = cleaned(code)
    check_rows(module.graph)
    x = torch.randn(1, 7, 8, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(module(x)[0], code(x))


def test_a_sum_in_the_place_of_numbers_that_nothing_else_reads_is_a_sum() -> None:
    names = [name_of(node) for node in cleaned(lambda x: (x * 2).add_(x.sin())).graph.nodes]
    assert "add" in names
    assert "add_" not in names


ALONG: dict[str, Callable[[Tensor, int], Tensor]] = {
    "topk": lambda x, dim: x.topk(2, dim=dim)[0],
    "sort": lambda x, dim: x.sort(dim=dim)[0],
    "gather": lambda x, dim: x.gather(dim, torch.zeros_like(x, dtype=torch.int64)),
    "scatter": lambda x, dim: x.scatter(dim, torch.zeros_like(x, dtype=torch.int64), 1.0),
    "cumsum": lambda x, dim: x.cumsum(dim),
    "max": lambda x, dim: x.max(dim=dim)[0],
}


@pytest.mark.parametrize("name", ALONG)
def test_only_what_leaves_rows_apart_is_taken(name: str) -> None:
    check_rows(cleaned(lambda x: ALONG[name](x, -1)).graph)
    with pytest.raises(CannotCutError, match=name):
        check_rows(cleaned(lambda x: ALONG[name](x, 1)).graph)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_act": "gelu"}, "gates are neither SiLU nor GELU by tanh"),
        ({"intermediate_size": 96}, "not multiples of 64"),
    ],
)
def test_experts_that_are_not_computed_are_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    model_type, sizes = FAMILIES["olmoe"]
    assert sizes.keys() >= EXPERTS.keys()
    CONFIG_MAPPING[model_type](**(SIZES | sizes | changes)).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=f"OlmoeForCausalLM.*{said}"):
        read_traced(tmp_path)
