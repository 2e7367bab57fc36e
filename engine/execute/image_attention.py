"""Attention of an image's rows to its later rows, which some models have beside causal attention."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from neo_desktop.engine.batch import ScheduledSequence
from neo_desktop.engine.execute.prefill_kernels import sdpa
from neo_desktop.engine.kv.layer import Rows
from neo_desktop.models.attention import AttentionSpec
from neo_desktop.models.vision.prompt import Sight


@dataclass(frozen=True, slots=True)
class ImageSpans:
    """The images in a chunk whose rows see later rows."""

    spans: tuple[tuple[int, int], ...] = ()  # first and last position, the last one excluded
    sight: Sight = Sight.CAUSAL  # layers in which they do

    @classmethod
    def of(cls, sequence: ScheduledSequence) -> Self:
        """Return the images in a chunk."""
        if sequence.images is None:
            return cls()
        return cls(sequence.images.spans(sequence.start, sequence.context_len), sequence.images.sight)

    def attend(self, q: Tensor, context: Rows, out: Tensor, start: int, spec: AttentionSpec) -> None:
        """Replace the output of causal attention for the rows of images.

        Args:
            q: [rows, heads, head_dim] of the chunk; `out` has the same shape.
            context: K and V [kv_parts, start + rows, kv_heads, head_dim].
            start: position of the first row.
        """
        window = spec.window
        if self.sight is Sight.WINDOWED and window is None:
            return
        for first, last in self.spans:
            rows = slice(first - start, last - start)
            begin, mask = 0, None
            if window is not None and window < last:
                begin = max(first + 1 - window, 0)
                positions = torch.arange(first, last, device=q.device).unsqueeze(1)
                mask = torch.arange(begin, last, device=q.device) > positions - window
            keys, values = context[0, begin:last], context[-1, begin:last]
            out[rows] = sdpa(q[rows], keys, values, spec.scale, mask, is_causal=False)


NO_IMAGES = ImageSpans()
