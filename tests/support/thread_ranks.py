"""Ranks of a divided model, each in a thread of one process."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from neo_desktop.models.ranks import Rank
from neo_desktop.models.stages import Reduce

PATIENCE_S = 60.0  # for a rank that must come; only a defect waits for so long
T = TypeVar("T")


def on_ranks(count: int, work: Callable[[Rank, Reduce], T]) -> list[T]:
    """Let each rank work in a thread, and return what each of them gives."""
    together = threading.Barrier(count)
    given: list[Tensor | None] = [None] * count

    def of_rank(number: int) -> T:
        def reduce(part: Tensor) -> None:
            given[number] = part.clone()
            together.wait(PATIENCE_S)
            part.copy_(torch.stack([each for each in given if each is not None]).sum(0))
            together.wait(PATIENCE_S)

        with torch.inference_mode():  # each thread's own
            return work(Rank(number, count), reduce)

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(of_rank, range(count)))
