"""The weights of a decoder, one for every supported family: they differ only by flags in the configuration.

What is computed with them is in `stages`.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from neo_desktop.models.config import ModelConfig
from neo_desktop.models.linear import Linear, why_plain

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class LayerWeights:
    """Weights of one layer, all in the model's dtype; matrices are `[out, in]`."""

    input_norm: Tensor  # [hidden]
    qkv: Linear  # [(heads + 2 * kv_heads) * head_dim, hidden]: queries, keys, values
    qk_norm: Tensor | None  # [heads + kv_heads, head_dim]: a row per head, so that one norm serves both
    output: Linear  # [hidden, heads * head_dim]
    post_attention_norm: Tensor  # [hidden]
    gate_up: Linear  # [2 * intermediate, hidden]: gates, then ups
    down: Linear  # [hidden, intermediate]


class Decoder:
    """A decoder-only transformer on one device and in one dtype.

    Its weights start uninitialised: fill them (`weights.named_weights`), then call `prepare`.
    """

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        self.config = config
        self.dtype = dtype
        self.device = device
        self.embedding = self._empty(config.vocab_size, config.hidden_size)
        self.layers = [self._empty_layer() for _ in range(config.num_layers)]
        self.final_norm = self._empty(config.hidden_size)
        tied = config.tie_word_embeddings
        self.lm_head = Linear(self.embedding) if tied else self._linear(config.vocab_size, config.hidden_size)
        self.inverse_frequencies = config.rope.inverse_frequencies(config.head_dim).to(device)

    def prepare(self) -> None:
        """Bring the weights, which are final now, into the form that the device multiplies fastest.

        One matrix follows the other, so that only one is held twice meanwhile.
        """
        for layer in self.layers:
            layer.qkv = layer.qkv.prepared()
            layer.output = layer.output.prepared()
            layer.gate_up = layer.gate_up.prepared()
            layer.down = layer.down.prepared()
        self.lm_head = self.lm_head.prepared(is_shared=self.config.tie_word_embeddings)
        *layers, _ = self.linears()
        forms = {linear.form for linear in layers}
        reason = why_plain(self.device, self.dtype)
        logger.debug(
            "weights of the layers: %s; of the head: %s%s",
            ", ".join(sorted(forms)),
            self.lm_head.form,
            f", since {reason}" if reason else "",
        )

    def linears(self) -> Iterator[Linear]:
        """Yield all matrices that are multiplied with: those of the layers, and the head."""
        for weights in self.layers:
            yield from (weights.qkv, weights.output, weights.gate_up, weights.down)
        yield self.lm_head

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def _linear(self, rows: int, columns: int, *, has_bias: bool = False) -> Linear:
        return Linear(self._empty(rows, columns), self._empty(rows) if has_bias else None)

    def _empty_layer(self) -> LayerWeights:
        config = self.config
        hidden, intermediate = config.hidden_size, config.intermediate_size
        normed_heads = config.num_heads + config.num_kv_heads
        return LayerWeights(
            input_norm=self._empty(hidden),
            qkv=self._linear(config.qkv_rows, hidden, has_bias=config.qkv_bias),
            qk_norm=self._empty(normed_heads, config.head_dim) if config.qk_norm else None,
            output=self._linear(hidden, config.num_heads * config.head_dim, has_bias=config.output_bias),
            post_attention_norm=self._empty(hidden),
            gate_up=self._linear(2 * intermediate, hidden, has_bias=config.mlp_bias),
            down=self._linear(hidden, intermediate, has_bias=config.mlp_bias),
        )
