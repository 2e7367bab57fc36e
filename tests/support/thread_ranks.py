"""Ranks of a divided model, one thread each."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from neo_desktop.models.decoder import Decoder
from neo_desktop.models.ops import Reduce
from neo_desktop.models.rank import Rank
from neo_desktop.models.ranks import config_of_rank, weights_of_rank
from neo_desktop.models.stored_tensor import StoredTensor
from neo_desktop.models.weights import Weights, named_weights

TIMEOUT_S = 60.0  # for a rank that must arrive; only a defect waits this long
T = TypeVar("T")


class ThreadSums:
    """Sums over ranks in threads."""

    def __init__(self, count: int) -> None:
        self._together = threading.Barrier(count)
        self._given: list[Tensor | None] = [None] * count
        self.count = count

    def of(self, number: int) -> Reduce:
        """Return a rank's sum function."""
        return partial(self._sum, number)

    def _sum(self, number: int, part: Tensor) -> None:
        self._given[number] = part.clone()
        self._together.wait(TIMEOUT_S)
        part.copy_(torch.stack([each for each in self._given if each is not None]).sum(0))
        self._together.wait(TIMEOUT_S)


def on_ranks(count: int, work: Callable[[Rank, Reduce], T]) -> list[T]:
    """Run each rank in a thread, and return their results."""
    sums = ThreadSums(count)

    def of_rank(number: int) -> T:
        with torch.inference_mode():  # inference mode is per thread
            return work(Rank(number, count), sums.of(number))

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(of_rank, range(count)))


def in_memory(name: str, tensor: Tensor) -> StoredTensor:
    shape, nbytes = tuple(tensor.shape), tensor.nbytes
    return StoredTensor(name, Path("memory"), shape, "F32", nbytes, lambda: iter([(0, tensor)]))


def parts_of(model: Decoder, count: int) -> list[Decoder]:
    """Divide a loaded model."""
    stored = {each.name: in_memory(each.name, each.dense()) for each in named_weights(model)}
    whole, parts = Weights(Path("memory"), "the model", dict(stored)), []
    for rank in (Rank(number, count) for number in range(count)):
        config = config_of_rank(model.config, rank)
        part = Decoder(config, dtype=model.dtype, device=model.device)
        weights = {each.name: each for each in named_weights(part)}
        weights_of_rank(whole, model.config, rank).load_into(weights, model.dtype, None)
        parts.append(part)
    return parts
