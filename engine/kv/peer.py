"""KV in a second GPU's memory, which attends to it: a memory device, as in Lamina.

Rows cross from GPU to GPU by torch's copies, CUDA's peer copies: the driver takes the way between the cards
where there is one, and host memory where there is none. A copy between two GPUs is put on the source's
current stream, and waits for the target's. So whoever works for such a pool does it inside `beside_device`:
there the model's GPU has a stream that nothing else is on, and the copies hold nobody up.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from neo_desktop.engine.kv.layer import KVLayer
from neo_desktop.engine.kv.storage import KVPool
from neo_desktop.models.config import ModelConfig


class PeerPool(KVPool):
    """K and V of all blocks in the memory of another device than the model's.

    Args:
        config, num_blocks, block_size, dtype, device, kind, sinks: see `KVPool`.
        home: the model's device.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        home: torch.device,
        kind: type[KVLayer] | None = None,
        sinks: Sequence[Tensor] | None = None,
    ) -> None:
        super().__init__(config, num_blocks, block_size, dtype, device, kind, sinks)
        self.home = home
        self._beside: torch.cuda.Stream | None = None
        if home.type == "cuda":
            self._beside = torch.cuda.Stream(home)  # type: ignore[no-untyped-call]

    @property
    def stores_early(self) -> bool:
        """See `KVPool`: rows are not made here."""
        return False

    @contextmanager
    def beside_device(self) -> Iterator[None]:
        """Let work go on beside that of the model's device, in order with this thread's for the pool's."""
        if self._beside is None:
            yield
            return
        stream = torch.cuda.current_stream(self.device)
        self._beside.wait_stream(stream)
        with torch.cuda.stream(self._beside), torch.cuda.stream(stream):
            yield
        stream.wait_stream(self._beside)


def peer_of(*pools: KVPool) -> PeerPool | None:
    """Return the one of these pools that is a second GPU's; None: none is."""
    return next((pool for pool in pools if isinstance(pool, PeerPool)), None)
