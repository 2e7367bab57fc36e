"""Images in an iteration: rows whose embeddings come from a vision tower."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from neo_desktop.engine.batch import IterationPlan, ScheduledSequence
from neo_desktop.engine.cuda.copies import upload
from neo_desktop.models.decoder import Decoder
from neo_desktop.models.stages import State


@dataclass(frozen=True, slots=True)
class ImageInputs:
    """The rows of a sub-batch that come from images."""

    rows: Tensor  # [n] int64, on the device
    embeddings: Tensor  # [n, hidden], on the device

    @classmethod
    def of(cls, placed: Iterable[tuple[ScheduledSequence, int]], decoder: Decoder) -> Self | None:
        """Return the rows of images; None: the sub-batch has none.

        Args:
            placed: the sequences with their first rows.
        """
        rows, embeddings = [], []
        for sequence, first_row in placed:
            if sequence.images is not None and (found := _found(sequence)).stop > found.start:
                rows.append(sequence.images.positions[found] - sequence.start + first_row)
                embeddings.append(sequence.images.embeddings[found])
        if not rows:
            return None
        device, dtype = decoder.device, decoder.dtype
        together = torch.from_numpy(np.concatenate(embeddings)).to(dtype)
        return cls(upload(np.concatenate(rows), torch.int64, device), upload(together, dtype, device))

    def place(self, state: State) -> None:
        """Overwrite the embeddings of the rows' tokens, which stages put first into `residual`."""
        state.residual[:, : self.embeddings.shape[1]].index_copy_(0, self.rows, self.embeddings)


def reads_images(plan: IterationPlan) -> bool:
    """Return True if the iteration has rows of images."""
    return any(
        sequence.images is not None and (found := _found(sequence)).stop > found.start
        for sequence in plan.sequences
    )


def _found(sequence: ScheduledSequence) -> slice:
    assert sequence.images is not None
    return sequence.images.within(sequence.start, sequence.context_len)
