"""Checks of KV layers against float64, in all memory types and thread modes: stored rows and attention."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from neo_desktop.engine.doctor.outcome import CheckError, Figures
from neo_desktop.engine.fallbacks import MECHANISMS
from neo_desktop.engine.kv.host_layer import HostLayer
from neo_desktop.engine.kv.layer import DecodeRows, KVLayer
from neo_desktop.engine.kv.layout import BLOCK_SIZE
from neo_desktop.engine.kv.storage import KVPool
from neo_desktop.engine.selfcheck.check import Check
from neo_desktop.engine.selfcheck.rig import BOUNDS, Rig, error_of, on_levels, require

INT8_STEP = 0.51 / 127  # relative to a row's largest element: half a step, plus rounding of its scale
LENGTHS = ((1,), (700, 16, 33, 1, 129, 512, 64, 15), (2500,))  # tokens per request, by batch
MANY = 24  # requests in an additional batch
DEADLINE_S = 60.0


class LayerCase:
    """Random KV of a batch in one layer, in scattered blocks.

    Args:
        lengths: tokens per request, including the newest.
        kind: layer class, which determines the memory.
    """

    def __init__(self, rig: Rig, dtype: torch.dtype, lengths: tuple[int, ...], kind: type[KVLayer]) -> None:
        config = rig.one_layer()
        self.device = torch.device("cpu") if kind is HostLayer else rig.device
        self.compute_dtype = rig.dtype
        self._rig = rig
        generator = torch.Generator().manual_seed(len(lengths))
        blocks = [-(-length // BLOCK_SIZE) for length in lengths]
        sinks = None if rig.sinks is None else [rig.sinks]
        pool = KVPool(config, sum(blocks) + 3, BLOCK_SIZE, dtype, self.device, kind, sinks)
        self.layer: KVLayer = pool.layer(0)
        order = torch.randperm(sum(blocks) + 3, generator=generator)[: sum(blocks)].int()
        self.tables = torch.zeros(len(lengths), max(blocks), dtype=torch.int32)
        self.slots: list[Tensor] = []
        for row, own in enumerate(torch.split(order, blocks)):
            self.tables[row, : len(own)] = own
            positions = torch.arange(lengths[row])
            self.slots.append(own[positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE)

        def rows(count: int, heads: int) -> Tensor:
            values = torch.randn(count, heads, config.head_dim, generator=generator)
            return values.to(self.compute_dtype)

        self.k, self.v = (rows(sum(lengths), config.num_kv_heads) for _ in range(2))
        self.q = rows(len(lengths), config.num_heads) * rig.query_size
        self.lengths = lengths
        self.ends = torch.tensor(lengths).cumsum(0)

    def write(self) -> None:
        """Store all tokens except each request's newest."""
        is_old = torch.ones(len(self.k), dtype=torch.bool)
        is_old[self.ends - 1] = False
        if is_old.any():
            slots = torch.cat(self.slots)[is_old]
            self.layer.write(*self._there(self.k[is_old], self.v[is_old], slots))

    def stored(self, dtype: torch.dtype) -> Tensor:
        out = torch.empty(2, *self.k.shape, dtype=dtype, device=self.device)
        self.layer.read(torch.cat(self.slots).to(self.device), out)
        return out.cpu()

    def attend(self, window: int | None) -> Tensor:
        """Store the newest tokens and attend from them: [requests, heads, head_dim]."""
        newest = self.ends - 1
        last = torch.stack([slots[-1] for slots in self.slots])
        q, k, v, slots, tables = self._there(self.q, self.k[newest], self.v[newest], last, self.tables)
        lens = torch.tensor(self.lengths, dtype=torch.int32, device=self.device)
        out = torch.full_like(q, torch.nan)
        self.layer.spec = self.layer.spec._replace(window=window)
        self.layer.decode(DecodeRows(q, tables, lens, out, k, v, slots))
        return out.cpu()

    def expected(self, rows: Tensor, window: int | None) -> Tensor:
        """Return the attention in float64, from rows as read by `stored`."""
        parts = (torch.split(part, list(self.lengths)) for part in rows)
        by_request = zip(torch.split(self.q, 1), *parts, strict=True)
        return torch.cat([dense(self._rig, q, keys, values, window) for q, keys, values in by_request])

    def _there(self, *tensors: Tensor) -> list[Tensor]:
        return [tensor.to(self.device) for tensor in tensors]


def dense(rig: Rig, q: Tensor, keys: Tensor, values: Tensor, window: int | None) -> Tensor:
    """Return attention in float64; the last query sees the last key."""
    group, softcap = q.shape[1] // keys.shape[1], rig.config.attention_softcap
    k, v = (part.double().repeat_interleave(group, 1) for part in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * rig.config.attention_scale
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    positions = torch.arange(len(k))
    distance = positions[-len(q) :, None] - positions
    scores.masked_fill_((distance < 0) | (distance >= (window or len(k))), -torch.inf)
    if rig.sinks is not None:
        sinks = rig.sinks.double().view(-1, 1, 1).expand(-1, len(q), 1)
        scores = torch.cat((scores, sinks), -1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(k)], v)


def check_rows(rig: Rig, dtype: torch.dtype, kind: type[KVLayer]) -> Figures:
    """Check that rows read from slots equal the rows stored."""
    case = LayerCase(rig, dtype, LENGTHS[1], kind)
    case.write()
    case.attend(None)
    rows = torch.stack((case.k, case.v))
    figures: Figures = {"bytes": rows.nbytes}
    if dtype is torch.int8:
        stored = case.stored(torch.float32)
        largest = rows.float().abs().amax(-1, keepdim=True)
        return require(float(((stored - rows.float()).abs() / largest).max()), INT8_STEP, figures)
    if not torch.equal(case.stored(rig.dtype), rows):
        raise CheckError("rows read from the cache have other values", figures)
    return figures


def check_decode(rig: Rig, dtype: torch.dtype, kind: type[KVLayer]) -> Figures:
    """Check decode attention against float64, for several batches, lengths and windows."""
    batches = (*LENGTHS, tuple(40 + 7 * n for n in range(MANY)))
    worst, num_cases = 0.0, 0
    for lengths in batches:
        case = LayerCase(rig, dtype, lengths, kind)
        case.write()
        for window in rig.windows:
            actual = case.attend(window)
            stored = case.stored(torch.float32 if dtype is torch.int8 else rig.dtype)
            error = error_of(actual, case.expected(stored, window))
            num_cases += 1
            require(error, BOUNDS[dtype], {"cases": num_cases, "batch": len(lengths), "window": window or 0})
            worst = max(worst, error)
    figures = require(worst, BOUNDS[dtype], {"cases": num_cases})
    bytes_ = 2 * sum(batches[-1]) * rig.config.num_kv_heads * rig.config.head_dim * dtype.itemsize
    return {**figures, "ms": rig.milliseconds(lambda: case.attend(None)), "bytes": bytes_}


def cpu_checks(rig: Rig) -> Iterator[Check]:
    """Yield the checks of KV in host memory."""
    for level in MECHANISMS["isa"].levels:
        for dtype, what in ((rig.dtype, str(rig.dtype).removeprefix("torch.")), (torch.int8, "int8")):
            yield Check(
                f"cpu-attention-{level.name}-{what}",
                f"CPU attention, {level.what}, KV in {what}",
                "isa",
                level.name,
                DEADLINE_S,
                partial(_attention, rig, "isa", level.name, dtype),
            )
    for mechanism in ("huge_pages", "affinity"):
        for level in MECHANISMS[mechanism].levels:
            run = partial(_attention, rig, mechanism, level.name, rig.dtype)
            yield Check.of_level(mechanism, level.name, DEADLINE_S, run)


def _attention(rig: Rig, mechanism: str, level: str, dtype: torch.dtype) -> Figures:
    with on_levels({mechanism: level}):
        rows = check_rows(rig, dtype, HostLayer)
        decode = check_decode(rig, dtype, HostLayer)
    return {**rows, **decode}
