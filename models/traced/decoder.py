"""The weights of a model whose stages are cut out of the code of `transformers`."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from neo_desktop.models.decoder import Decoder
from neo_desktop.models.linear.protocol import Linear
from neo_desktop.models.traced.config import TracedConfig


class TracedDecoder(Decoder):
    """A `decoder.Decoder`; its weights have the names of transformers."""

    config: TracedConfig

    def _gather(self) -> None:
        self.spec = self.config.of_model
        self.layers = []
        self.stages: Any = None  # `TracedStages`, made once
        # Rows of the next `TracedStages.embed`, and embeddings that replace those of their tokens.
        self.given: tuple[Tensor, Tensor] | None = None

    @property
    def sinks(self) -> list[Tensor] | None:
        return [self.tensors[name] for name in self.spec.sinks] or None

    def linears(self) -> Iterator[Linear]:
        yield from (self.matrices[name] for name, _ in self.config.each_matrix() if name != "head")
        yield self.lm_head
