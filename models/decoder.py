"""One decoder for every supported family; the families differ only by flags in the configuration.

An iteration over a sub-batch of n tokens, of any requests, in any mix of prompts and decodes:

    hidden = decoder.embed(token_ids)
    rotation = decoder.rotary(positions)
    for layer in range(config.num_layers):
        q, k, v = decoder.pre_attention(layer, hidden, rotation)
        ...                            # the caller stores k and v and attends: the decoder sees no KV cache
        hidden = decoder.post_attention(layer, hidden, attention_out)
    logits = decoder.logits(hidden[last_token_of_each_request])
"""

import logging

import torch
from torch import Tensor
from torch.nn.functional import embedding

from neo_desktop.models.config import ModelConfig
from neo_desktop.models.layers import LayerWeights, Rotary, gated_silu, rms_norm, rotary, rotate
from neo_desktop.models.linear import Linear, why_plain

logger = logging.getLogger(__name__)


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
        self._inverse_frequencies = config.rope.inverse_frequencies(config.head_dim).to(device)

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
        forms = {linear.form for w in self.layers for linear in (w.qkv, w.output, w.gate_up, w.down)}
        reason = why_plain(self.device, self.dtype)
        logger.debug(
            "weights of the layers: %s; of the head: %s%s",
            ", ".join(sorted(forms)),
            self.lm_head.form,
            f", since {reason}" if reason else "",
        )

    def embed(self, token_ids: Tensor) -> Tensor:
        """Hidden states `[n, hidden]` of `token_ids` `[n]` int64."""
        return embedding(token_ids, self.embedding)

    def rotary(self, positions: Tensor) -> Rotary:
        """The rotation for tokens at `positions` `[n]` int64, to be shared by all layers."""
        return rotary(positions, self._inverse_frequencies, self.config.rope.attention_factor)

    def pre_attention(self, layer: int, hidden: Tensor, rotation: Rotary) -> tuple[Tensor, Tensor, Tensor]:
        """Queries `[n, heads, head_dim]`, keys and values `[n, kv_heads, head_dim]` from `[n, hidden]`.

        The heads of one token are contiguous; the tokens may be strided (views of one product).
        """
        config, weights = self.config, self.layers[layer]
        normed = rms_norm(hidden, weights.input_norm, config.rms_norm_eps)
        qkv = weights.qkv(normed).view(len(hidden), -1, config.head_dim)
        query_key, value = qkv[:, : -config.num_kv_heads], qkv[:, -config.num_kv_heads :]
        if weights.qk_norm is not None:
            query_key = rms_norm(query_key, weights.qk_norm, config.rms_norm_eps)
        query_key = rotate(query_key, rotation)
        return query_key[:, : config.num_heads], query_key[:, config.num_heads :], value

    def post_attention(self, layer: int, hidden: Tensor, attention_out: Tensor) -> Tensor:
        """The layer's output `[n, hidden]` from its input and `attention_out` `[n, heads, head_dim]`."""
        weights = self.layers[layer]
        hidden = hidden + weights.output(attention_out.flatten(1))
        normed = rms_norm(hidden, weights.post_attention_norm, self.config.rms_norm_eps)
        gated = gated_silu(weights.gate_up(normed))
        return hidden + weights.down(gated)

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores `[m, vocab]` float32 of the next token after each of `hidden` `[m, hidden]`."""
        return self.lm_head(self.final_states(hidden)).float()

    def final_states(self, hidden: Tensor) -> Tensor:
        """What the head reads, and what stands for a text: `hidden` `[m, hidden]`, normed."""
        return rms_norm(hidden, self.final_norm, self.config.rms_norm_eps)

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
