"""KV with a GPU's layout on plain torch: replaces `DeviceLayer` without a GPU.

`DeviceLayer` would work in Triton's interpreter, but far too slowly for tests of whole iterations.
"""

import torch
from torch import Tensor

from neo_desktop.engine.kv.layer import DecodeRows, KVLayer, KVShape, Rows


class TorchLayer(KVLayer):
    """K and V [num_blocks, block_size, kv_heads, head_dim]; attention in float64, request by request."""

    __slots__ = ("_k", "_v")

    def _bind(self, *parts: Tensor) -> None:
        self._k, self._v = parts[0], parts[-1]

    @classmethod
    def allocate(
        cls, config: KVShape, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, ...]:
        shape = (config.num_layers, num_blocks, block_size, config.num_kv_heads, config.head_dim)
        return tuple(torch.empty(shape, dtype=dtype, device=device) for _ in range(config.kv_parts))

    def write(self, k: Tensor, v: Tensor, slots: Tensor) -> None:
        self._k.flatten(0, 1)[slots] = k
        self._v.flatten(0, 1)[slots] = v

    def read(self, slots: Tensor, out: Rows) -> None:
        for rows, cache in ((out[0], self._k), (out[-1], self._v)):
            rows.copy_(cache.flatten(0, 1)[slots])

    def decode(self, rows: DecodeRows) -> None:
        q, block_tables, context_lens, out, k, v, slots, _ = rows
        scale, window, sinks, softcap = self.spec
        if k is not None and v is not None and slots is not None:
            self.write(k, v, slots)
        for row, (table, context_len) in enumerate(zip(block_tables.long(), context_lens, strict=True)):
            end = int(context_len)
            first = max(end - (window or end), 0)
            keys, values = (
                cache[table].flatten(0, 1)[first:end].double().transpose(0, 1) for cache in (self._k, self._v)
            )
            queries = q[row].double().unflatten(0, (keys.shape[0], -1))
            scores = queries @ keys.transpose(1, 2) * scale
            if softcap is not None:
                scores = softcap * (scores / softcap).tanh()
            if sinks is not None:
                scores = torch.cat((scores, sinks.double().view(*queries.shape[:2], 1)), 2)
            out[row] = (scores.softmax(-1)[:, :, : end - first] @ values).flatten(0, 1).to(out.dtype)
