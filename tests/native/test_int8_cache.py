"""An int8 cache rounds rows to at most 127 steps; attention over it is exact for the stored rows."""

from dataclasses import replace

import pytest
import torch
from paged_case import TOLERANCE, PagedCase, make_case
from torch import Tensor

from neo_desktop import native

each_isa = pytest.mark.parametrize("isa", native.available_isas())


class Int8Case:
    """A random problem with keys and values from an int8 cache."""

    def __init__(self, lengths: list[int], **shape: int) -> None:
        case = make_case(lengths, block_size=16, **shape)  # type: ignore[arg-type]
        num_pages, kv_heads, page_tokens, head_dim = case.v_cache.shape
        self.k = native.empty_paired_keys(
            num_pages, kv_heads=kv_heads, page_tokens=page_tokens, head_dim=head_dim, dtype=torch.int8
        ).zero_()
        self.v = torch.zeros(case.v_cache.shape, dtype=torch.int8)
        self.scales = [torch.full(case.v_cache.shape[:3], torch.nan) for _ in range(2)]
        rows = [cache.transpose(1, 2).flatten(0, 1) for cache in (case.k_cache, case.v_cache)]
        used = rows[0].isfinite().all(-1).all(-1).nonzero().flatten()
        native.paged_kv_write(
            rows[0][used], rows[1][used], self.k, self.v, used, k_scale=self.scales[0], v_scale=self.scales[1]
        )
        self.exact = case
        self.stored = replace(case, k_cache=self.rows(0), v_cache=self.rows(1))  # the cache's content in fp32

    def rows(self, which: int) -> Tensor:
        cache = (self.k.flatten(-2), self.v)[which]
        return cache.float() * self.scales[which][..., None]

    def run(self, isa: str) -> Tensor:
        case = self.exact
        return native.paged_attention_decode(
            case.q,
            self.k,
            self.v,
            case.block_tables,
            case.context_lens,
            case.scale,
            block_size=case.block_size,
            window=case.window,
            sinks=case.sinks,
            softcap=case.softcap,
            k_scale=self.scales[0],
            v_scale=self.scales[1],
            isa=isa,
        )


@each_isa
@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize("head_dim", [8, 64, 72, 128])
@pytest.mark.parametrize("blocks_per_page", [1, 4])
def test_attention_over_the_stored_rows_is_exact(
    isa: str, group: int, head_dim: int, blocks_per_page: int
) -> None:
    case = Int8Case([1, 17, 300, 1100], group=group, head_dim=head_dim, blocks_per_page=blocks_per_page)
    assert case.stored.error(case.run(isa)) < TOLERANCE[torch.float32]


@each_isa
def test_window(isa: str) -> None:
    case = Int8Case([40, 700], group=2, window=100)
    assert case.stored.error(case.run(isa)) < TOLERANCE[torch.float32]


@each_isa
def test_sinks(isa: str) -> None:
    case = Int8Case([1, 40, 700], group=2)
    sinks = torch.tensor([-3.0, 0.0, 1.0, 20.0])
    case.exact, stored = replace(case.exact, sinks=sinks), replace(case.stored, sinks=sinks)
    assert stored.error(case.run(isa)) < TOLERANCE[torch.float32]


@each_isa
@pytest.mark.parametrize("group", [1, 5])
def test_softcap(isa: str, group: int) -> None:
    case = Int8Case([1, 40, 700], group=group)
    changes = {"q": 3 * case.exact.q, "softcap": 1.5}
    case.exact, stored = replace(case.exact, **changes), replace(case.stored, **changes)
    assert stored.error(case.run(isa)) < TOLERANCE[torch.float32]


def test_stored_rows_are_within_half_a_step() -> None:
    case = Int8Case([500])
    for which, exact in enumerate((case.exact.k_cache, case.exact.v_cache)):
        rows, scales = case.rows(which), case.scales[which][..., None]
        known = exact.isfinite()
        assert ((rows - exact).abs() <= scales * 0.501)[known].all()


def test_rows_of_zeros_denormals_and_non_finite_values() -> None:
    rows = torch.zeros(4, 1, 8)
    rows[1] = 1e-40
    rows[2, 0, 3] = torch.nan
    rows[3, 0, 3] = -torch.inf
    k = native.empty_paired_keys(1, kv_heads=1, page_tokens=16, head_dim=8, dtype=torch.int8).zero_()
    v = torch.zeros(1, 1, 16, 8, dtype=torch.int8)
    scales = [torch.zeros(1, 1, 16) for _ in range(2)]
    native.paged_kv_write(rows, rows, k, v, torch.arange(4), k_scale=scales[0], v_scale=scales[1])
    stored = v[0, 0].float() * scales[1][0, 0, :, None]
    assert (stored[0] == 0).all()
    assert stored[1].allclose(torch.full((8,), 1e-40), atol=1e-42)
    assert stored[2:4].isnan().all(), "a row that is not finite must not look as if it were"


def test_how_far_int8_moves_the_output() -> None:
    case: PagedCase = make_case([4000], group=4, head_dim=128)
    quantized = Int8Case([4000], group=4, head_dim=128)
    assert case.error(quantized.run(native.default_isa())) < 0.02
