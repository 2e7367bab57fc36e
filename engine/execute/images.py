"""Images in an iteration: rows whose embeddings come from a vision tower."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from neo_desktop.engine.batch import ScheduledSequence
from neo_desktop.engine.cuda.copies import upload
from neo_desktop.models.stages import Stages
from neo_desktop.models.state import State
from neo_desktop.models.traced.decoder import TracedDecoder

REPEATS = 4  # of a pair's rotation in `State.cos` of traced models, which has all: cos, cos, sin, sin


@dataclass(frozen=True, slots=True)
class ImageInputs:
    """The rows of a sub-batch that come from images."""

    stages: Stages
    rows: Tensor  # [n] int64, on the device
    embeddings: Tensor  # [n, hidden], on the device
    rotations: Tensor  # [axes but the first, n] int32, on the device: positions by which rows are rotated
    columns: tuple[Tensor, ...]  # of these axes: indices of the numbers that they rotate

    @classmethod
    def of(cls, placed: Iterable[tuple[ScheduledSequence, int]], stages: Stages) -> Self | None:
        """Return the rows of images, given sequences with their first rows; None: there are none."""
        rows, embeddings, rotations = [], [], []
        axes: tuple[int, ...] = ()
        for sequence, first_row in placed:
            assert sequence.images is not None
            found = sequence.images.within(sequence.start, sequence.context_len)
            if found.stop > found.start:
                rows.append(sequence.images.positions[found] - sequence.start + first_row)
                embeddings.append(sequence.images.embeddings[found])
                rotations.append(sequence.images.others[:, found])
                axes = sequence.images.axes * REPEATS
        if not rows:
            return None
        device, dtype = stages.decoder.device, stages.decoder.dtype
        together = torch.from_numpy(np.concatenate(embeddings)).to(dtype)
        return cls(
            stages,
            upload(np.concatenate(rows), torch.int64, device),
            upload(together, dtype, device),
            upload(np.concatenate(rotations, axis=1), torch.int32, device),
            tuple(
                upload(np.flatnonzero(np.equal(axes, axis)), torch.int64, device)
                for axis in range(1, 1 + len(rotations[0]))
            ),
        )

    def embed(self, token_ids: Tensor, positions: Tensor, state: State) -> None:
        """Do what `Stages.embed` does, with the embeddings and rotations of images."""
        decoder = self.stages.decoder
        assert isinstance(decoder, TracedDecoder)  # others have no vision towers
        decoder.given = self.rows, self.embeddings
        self.stages.embed(token_ids, positions, state)
        decoder.given = None
        for other, columns in zip(self.rotations, self.columns, strict=True):
            cos, sin = (torch.empty_like(angles[self.rows]) for angles in (state.cos, state.sin))
            self.stages.rotate(other, cos, sin)
            state.cos[self.rows.unsqueeze(1), 0, columns] = cos[:, 0, columns]
