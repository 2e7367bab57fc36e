"""KV in GPU memory gives the same rows and attention as KV in host memory, and moves between the two."""

from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from dense_attention import dense
from hypothesis import given
from kv_pools import spoiled
from seeds import few_examples

from neo_desktop.engine.kv import device_layer
from neo_desktop.engine.kv.cache import KVCache
from neo_desktop.engine.kv.device_layer import DeviceLayer
from neo_desktop.engine.kv.disk_items import Blocks
from neo_desktop.engine.kv.host_layer import HostLayer
from neo_desktop.engine.kv.layer import DecodeRows, KVLayer, Rows, block_bytes, slots_of
from neo_desktop.engine.kv.storage import KVPool
from neo_desktop.engine.kv.streamed import StreamedPool
from neo_desktop.engine.kv_tier import KVTier
from neo_desktop.models.attention import AttentionSpec
from neo_desktop.models.config import ModelConfig
from neo_desktop.models.shapes import shape

pytestmark = pytest.mark.usefixtures("kernel_level")
CPU = torch.device("cpu")
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
# Relative error of a head's output vector, as in test_paged_decode.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 1.5e-2}
NUM_SMS = 6  # so few that a small batch is split into several parts


@pytest.fixture(scope="module", autouse=True)
def _few_multiprocessors() -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_layer, "num_sms", lambda device: NUM_SMS)
        yield


def make_config(kv_heads: int = 2, group: int = 2, head_dim: int = 64) -> ModelConfig:
    return replace(
        shape("tiny"), num_layers=2, num_heads=kv_heads * group, num_kv_heads=kv_heads, head_dim=head_dim
    )


def make_pool(
    config: ModelConfig,
    kind: type[KVLayer],
    num_blocks: int,
    dtype: torch.dtype,
    device: torch.device,
    sinks: list[torch.Tensor] | None = None,
) -> KVPool:
    return spoiled(KVPool(config, num_blocks, 16, dtype, device, kind, sinks))


def some_rows(config: ModelConfig, count: int, dtype: torch.dtype) -> Rows:
    return torch.randn(2, count, config.num_kv_heads, config.head_dim).to(dtype)


@given(data=st.data())
@few_examples
def test_decode_attention_equals_the_hosts_and_float64(data: st.DataObject, device: torch.device) -> None:
    torch.manual_seed(data.draw(st.integers(0, 2**16)))
    dtype = data.draw(st.sampled_from(FLOATS))
    config = make_config(*data.draw(st.sampled_from([(1, 1, 64), (2, 3, 80), (1, 8, 64), (3, 4, 32)])))
    window = data.draw(st.none() | st.integers(1, 300))
    sinks = None
    if data.draw(st.booleans()):
        config = replace(config, attention_sinks=True)
        sinks = list(torch.randn(2, config.num_heads).to(dtype) * 3)
    config = replace(config, attention_softcap=data.draw(st.sampled_from([None, 0.8])))
    lengths = data.draw(st.lists(st.integers(1, 60) | st.integers(200, 280), min_size=1, max_size=3))
    width = -(-max(lengths) // 16)
    num_blocks = width * len(lengths) + 2
    tables = torch.randperm(num_blocks)[: width * len(lengths)].view(len(lengths), width)
    contexts = [slots_of(table, 16)[:length] for table, length in zip(tables, lengths, strict=True)]
    rows = [some_rows(config, length, dtype) for length in lengths]
    q = torch.randn(len(lengths), config.num_heads, config.head_dim).to(dtype)
    arguments = (
        q,
        torch.stack([k[-1] for k, _ in rows]),
        torch.stack([v[-1] for _, v in rows]),
        torch.stack([context[-1] for context in contexts]),
        tables.int(),
        torch.tensor(lengths, dtype=torch.int32),
    )
    outs = []
    for kind, where in ((DeviceLayer, device), (HostLayer, CPU)):
        layer = make_pool(config, kind, num_blocks, dtype, where, sinks).layer(1)
        for context, (k, v) in zip(contexts, rows, strict=True):
            layer.write(k[:-1].to(where), v[:-1].to(where), context[:-1].to(where))
        out = torch.full_like(q, torch.nan, device=where)
        moved = (tensor.to(where) for tensor in arguments)
        layer.spec = layer.spec._replace(window=window)
        moved_q, k, v, slots, moved_tables, lens = moved
        layer.decode(DecodeRows(moved_q, moved_tables, lens, out, k, v, slots))
        outs.append(out.cpu())
    how = config.attention_scale, window, None if sinks is None else sinks[1], config.attention_softcap
    expected = torch.cat([dense(q[i : i + 1], k, v, *how) for i, (k, v) in enumerate(rows)])
    for out in outs:
        error = (out.double() - expected).norm(dim=-1) / expected.norm(dim=-1)
        assert (error < TOLERANCE[dtype]).all()


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_rows_come_back_as_they_were_written(dtype: torch.dtype, device: torch.device) -> None:
    config = make_config()
    pool = make_pool(config, DeviceLayer, 3, dtype, device)
    order = torch.randperm(48).to(device)
    rows = some_rows(config, 20, dtype).to(device)
    pool.layer(1).write(rows[0], rows[1], order[:20])
    found = torch.empty(2, 48, *rows.shape[2:], dtype=dtype, device=device)
    pool.layer(1).read(order, found)
    assert torch.equal(found[:, :20], rows)
    assert found[:, 20:].isnan().all()
    pool.layer(0).read(order, found)
    assert found.isnan().all()
    assert sum(part.nbytes for part in pool.parts) == 3 * 2 * block_bytes(config, 16, dtype)


def test_8_bits_are_refused(device: torch.device) -> None:
    with pytest.raises(ValueError, match=r"KV in torch\.int8 is for host memory only"):
        KVPool(make_config(), 1, 16, torch.int8, device, DeviceLayer)


@pytest.mark.sample(0)
def test_making_a_pool_launches_every_variant_of_decode_attention(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later batches never wait for the compiler, with merged parts or with a single one."""
    launched: list[bool] = []
    attend = device_layer.paged_decode

    def recorded(*arguments: object) -> None:
        launched.append(arguments[7].shape[2] > 1)  # type: ignore[attr-defined]
        attend(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(device_layer, "paged_decode", recorded)
    monkeypatch.setattr(device_layer, "num_sms", lambda device: 16)
    config = make_config()
    layer = KVPool(config, 400, 16, torch.float16, device, DeviceLayer).layer(0)
    at_start = list(launched)
    launched.clear()
    for requests in (1, 2, 5, 40):
        for window in (None, 20, 700):
            zeros = torch.zeros(requests, dtype=torch.int32, device=device)
            q = torch.zeros(requests, config.num_heads, config.head_dim, dtype=torch.float16, device=device)
            k, tables = q[:, : config.num_kv_heads], zeros.new_zeros(requests, 400)
            layer.spec = AttentionSpec(1.0, window)
            layer.decode(DecodeRows(q, tables, zeros, q, k, k, zeros.long() - 1))
    assert set(launched) == set(at_start) == {False, True}


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", FLOATS)
def test_blocks_are_the_same_bytes_in_all_memories(dtype: torch.dtype, device: torch.device) -> None:
    config = replace(make_config(), num_layers=4, layer_windows=(None,) * 4)
    pools = [
        make_pool(config, HostLayer, 12, dtype, CPU),
        make_pool(config, DeviceLayer, 9, dtype, device),
        spoiled(StreamedPool(config, 7, 16, dtype, device, DeviceLayer)),
    ]
    blocks = [[8, 2, 3], [1, 0, 7], [2, 6, 5]]
    content = None
    for pool, there in zip(pools, blocks, strict=True):
        access = Blocks(KVCache({}, 16), KVTier.HOST, pool)
        if content is None:
            for layer in range(config.num_layers):
                pool.rows_at(slots_of(torch.tensor(there), 16)).write(layer, some_rows(config, 48, dtype))
            content = np.empty((3, access.num_bytes), np.uint8)
            access.take(there, content)
        access.put(there, content)
        again = np.empty_like(content)
        access.take(there, again)
        assert (again == content).all()
        assert len(set(map(bytes, content))) == 3
