"""Measures workers: the attention of a layer, and the network round trip.

Both are measured together, and separated by their growth: attention grows with the context, network time
with the rows alone. The fixed cost per message in a worker, some tens of microseconds, counts as network
time.
"""

import logging
import time

import torch

from neo_desktop.engine.kv.layer import DecodeRows
from neo_desktop.engine.kv.storage import KVPool, KVStorage
from neo_desktop.engine.kv_tier import KVTier
from neo_desktop.engine.predict.cost_model import Curve, Network, Surface
from neo_desktop.models.attention import heads_of
from neo_desktop.models.decoder import Decoder

logger = logging.getLogger(__name__)

REQUESTS = (1, 4, 16, 64)
CONTEXTS = (64, 1024)
STORED_TOKENS = 4096  # contexts repeat these tokens
REPEATS = 3
MAX_SECONDS = 3.0
# For workers that no process could measure: a round trip of one millisecond.
UNKNOWN = Surface((1, 64), (64, 1024), ((1.0, 1.1), (1.5, 3.0)))


@torch.inference_mode()
def measured_worker(pool: KVPool, num_heads: int, dtype: torch.dtype) -> Surface:
    """Return the time of decode attention in a worker's memory per layer, in ms: over (requests, context).

    The content of the memory is lost. Measurements that would take too long are left out, from the largest
    request counts down; the first two always run.

    Args:
        dtype: of the queries.

    Raises:
        WorkerLostError: the worker does not answer.
    """
    parts, _, kv_heads, head_dim = pool.rows_shape(0)
    layer = pool.layer(0)
    num_tokens = min(STORED_TOKENS, pool.num_blocks * pool.block_size)
    rows = torch.randn(pool.rows_shape(num_tokens), dtype=dtype)
    layer.write(rows[0], rows[-1], torch.arange(num_tokens))

    started_s = time.perf_counter()
    rows_ms: list[list[float]] = []
    for requests in REQUESTS:
        if len(rows_ms) >= 2 and time.perf_counter() - started_s > MAX_SECONDS:
            break
        if requests > num_tokens // pool.block_size:
            break
        row = []
        for context in CONTEXTS:
            width = -(-context // pool.block_size)
            blocks = torch.arange(requests * width, dtype=torch.int32) % (num_tokens // pool.block_size)
            tables = blocks.view(requests, width)
            # The newest tokens are stored, each in its own block.
            tables[:, -1] = torch.arange(requests, dtype=torch.int32)
            lens = torch.full((requests,), context, dtype=torch.int32)
            qkv = torch.randn(requests, num_heads + parts * kv_heads, head_dim, dtype=dtype)
            q, k, v = heads_of(qkv, num_heads, kv_heads)
            decodes = DecodeRows(
                q, tables, lens, torch.empty(requests, num_heads, head_dim, dtype=dtype), k, v
            )
            times = []
            for _ in range(1 + REPEATS):  # the first repetition sends the tables
                begun_s = time.perf_counter()
                layer.decode(decodes)
                times.append(time.perf_counter() - begun_s)
            row.append(1e3 * sorted(times)[len(times) // 4])
        rows_ms.append(row)
    logger.debug("%s: %s ms for %s requests of %s tokens", pool.worker, rows_ms, REQUESTS, CONTEXTS)
    return Surface(REQUESTS[: len(rows_ms)], CONTEXTS, rows_ms)


def divided(measured: Surface, sent_share: float) -> tuple[Surface, Network]:
    """Split the time of a layer's remote attention into attention and network.

    Args:
        measured: over (requests, context).
        sent_share: share of a row's network traffic that goes to the worker.
    """
    requests, (near, far) = measured.x, measured.y
    slopes = [(row[1] - row[0]) / (far - near) for row in measured.ms]
    attention = Surface(requests, (near, far), [(slope * near, slope * far) for slope in slopes])
    way = Curve(
        requests, [max(row[0] - slope * near, 0.0) for row, slope in zip(measured.ms, slopes, strict=True)]
    )
    # Latency dominates for a single row, bandwidth for many rows.
    return attention, Network(way, Curve(requests, [sent_share * (ms - way.ms[0]) for ms in way.ms]))


def measured_workers(
    storage: KVStorage, decoder: Decoder
) -> tuple[dict[KVTier, Surface], dict[KVTier, Network]]:
    """Return the attention and network times per worker; absent workers get the times of others."""
    config = decoder.config
    sent = config.qkv_heads  # per row: q, k and v there, the output back
    sent_share = sent / (sent + config.num_heads)
    surfaces: dict[KVTier, Surface] = {}
    absent = []
    for tier in storage.tiers:
        pool = storage[tier]
        if pool.worker is None:
            continue
        if pool.num_blocks >= REQUESTS[1]:
            surfaces[tier] = measured_worker(pool, decoder.config.num_heads, decoder.dtype)
        else:
            absent.append(tier)
    typical = next(iter(surfaces.values()), UNKNOWN)
    attention: dict[KVTier, Surface] = {}
    networks: dict[KVTier, Network] = {}
    for tier, surface in (surfaces | dict.fromkeys(absent, typical)).items():
        attention[tier], networks[tier] = divided(surface, sent_share)
    return attention, networks
