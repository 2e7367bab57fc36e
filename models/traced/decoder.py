"""The weights of a model whose stages are cut out of the code of `transformers`."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from neo_desktop.models.decoder import Decoder, empty_embedding
from neo_desktop.models.expert_slots import expert_slots
from neo_desktop.models.linear.dense import DENSE
from neo_desktop.models.linear.offloaded import OffloadedFormat
from neo_desktop.models.linear.protocol import Linear, WeightFormat
from neo_desktop.models.linear.shares import UNMEASURED
from neo_desktop.models.traced.config import TracedConfig


@dataclass(frozen=True, slots=True)
class TracedLayer:
    """A layer's weights outside the fused matrices."""

    sinks: Tensor | None = None


class TracedDecoder(Decoder):
    """A `decoder.Decoder`; its weights have the names of transformers.

    Args:
        main: has the embedding, and for a layer of multi-token prediction the output head; None: the decoder
            has its own.
    """

    def __init__(
        self,
        config: TracedConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        form: WeightFormat = DENSE,
        main: Decoder | None = None,
    ) -> None:
        of_model = config.of_model
        self.config: TracedConfig = config
        self.dtype = dtype
        self.device = device
        self.spec = of_model
        rows, columns = of_model.parameters[of_model.embedding]
        self.embedding = (
            empty_embedding(form, rows, columns, dtype, device) if main is None else main.embedding
        )
        self.tensors = {
            name: torch.empty(shape, dtype=torch.float32 if name in of_model.wide else dtype, device=device)
            for name, shape in of_model.parameters.items()
            if name != of_model.embedding
        }
        self.matrices = {"embedding": self.embedding}
        for fused in of_model.all_matrices:
            if fused.name == "head" and main is not None and config.source.predicts == "layer":
                self.matrices["head"] = main.lm_head
            else:
                self.matrices[fused.name] = form.named(fused.name).empty(
                    sum(fused.rows), fused.columns, has_bias=bool(fused.biases), dtype=dtype, device=device
                )
        self.lm_head = self.matrices.get("head", self.embedding)
        self.layers = [TracedLayer() for _ in range(config.num_layers)]  # type: ignore[misc]
        if of_model.sinks:
            self.layers = [TracedLayer(self.tensors[name]) for name in of_model.sinks]  # type: ignore[misc]
        self.streamed_shares = self.streamed_experts = UNMEASURED
        if isinstance(form, OffloadedFormat) and config.experts is not None:
            mixtures = [[self.matrices[fused.name] for fused in moe.matrices] for moe in of_model.moe_layers]
            stacks = ((each[0], each[-2], each[-1]) for each in mixtures)
            self.expert_slots = expert_slots(stacks, config.experts.count, form.moves, device)
        self.stages: Any = None  # `TracedStages`, made once
        # Rows of the next `TracedStages.embed`, and embeddings that replace those of their tokens.
        self.given: tuple[Tensor, Tensor] | None = None

    def _others(self) -> Iterator[Tensor]:
        yield from self.tensors.values()

    def linears(self) -> Iterator[Linear]:
        inner = self.matrices.keys() - {"embedding", "head"}
        yield from (linear for name, linear in self.matrices.items() if name in inner)
        yield self.lm_head
