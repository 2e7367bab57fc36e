"""KV in a second GPU's memory, which attends to it: a memory device, as in Lamina.

Rows cross from GPU to GPU by torch's copies, CUDA's peer copies: the driver takes the way between the cards
where there is one, and host memory where there is none. A copy between two GPUs is put on the source's
current stream, and waits for the target's. So work for such a pool happens inside `beside_device`:
there the model's GPU has a stream that nothing else is on, and the copies delay no other work.

There are computers on which the driver says that cards reach each other, but what is copied does not arrive:
an IOMMU stands between them (pytorch issues 84803 and 132397). Nothing reports an error. So the bytes are
compared at the start (`check_copies`), and on the lower rung of `peer_copies` each copy is two, through
pinned host memory.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from neo_desktop.engine.kv.layer import KVLayer
from neo_desktop.engine.kv.storage import KVPool
from neo_desktop.engine.ladder import ladder
from neo_desktop.models.config import ModelConfig

CHECKED_BYTES = (1, 4097, 1 << 24)  # of each copy that is compared


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


def across(rows: Tensor, device: torch.device) -> Tensor:
    """Return a copy of rows in another device's memory; both devices' current streams take part."""
    there = torch.empty(rows.shape, dtype=rows.dtype, device=device)
    copy_across(rows, there)
    return there


def copy_across(source: Tensor, target: Tensor) -> None:
    """Copy to another device's memory; both devices' current streams take part."""
    if ladder.rung("peer_copies") == "direct":
        target.copy_(source, non_blocking=True)
        return
    is_gpu = source.device.type == "cuda"
    # torch keeps pinned memory from others until the streams are past it.
    host = torch.empty(source.shape, dtype=source.dtype, pin_memory=is_gpu)
    host.copy_(source, non_blocking=True)
    if is_gpu:
        torch.cuda.current_stream(target.device).wait_stream(torch.cuda.current_stream(source.device))
    target.copy_(host, non_blocking=True)


def check_copies(one: torch.device, other: torch.device) -> int | None:
    """Copy bytes from each of two devices to the other, on the present rung, and compare them.

    Returns:
        How many bytes the first copy had that did not arrive; None: all did.
    """
    for size in CHECKED_BYTES:
        sent = torch.randint(1, 255, (size,), dtype=torch.uint8)
        for here, there in ((one, other), (other, one)):
            source, target = sent.to(here), torch.zeros(size, dtype=torch.uint8, device=there)
            for device in (here, there):
                _wait_for(device)
            copy_across(source, target)
            for device in (here, there):
                _wait_for(device)
            if not torch.equal(target.cpu(), sent):
                return size
    return None


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peer_of(*pools: KVPool) -> PeerPool | None:
    """Return the one of these pools that is a second GPU's; None: none is."""
    return next((pool for pool in pools if isinstance(pool, PeerPool)), None)
