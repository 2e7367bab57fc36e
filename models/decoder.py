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

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear

from neo_desktop.models.config import ModelConfig
from neo_desktop.models.layers import LayerWeights, Rotary, gated_silu, rms_norm, rotary, rotate


class Decoder:
    """A decoder-only transformer on one device and in one dtype; its weights start uninitialised."""

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        self.config = config
        self.dtype = dtype
        self.device = device
        self.embedding = self._empty(config.vocab_size, config.hidden_size)
        self.layers = [self._empty_layer() for _ in range(config.num_layers)]
        self.final_norm = self._empty(config.hidden_size)
        tied = config.tie_word_embeddings
        self.lm_head = self.embedding if tied else self._empty(config.vocab_size, config.hidden_size)
        self._inverse_frequencies = config.rope.inverse_frequencies(config.head_dim).to(device)

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
        qkv = linear(normed, weights.qkv, weights.qkv_bias).view(len(hidden), -1, config.head_dim)
        query_key, value = qkv[:, : -config.num_kv_heads], qkv[:, -config.num_kv_heads :]
        if weights.qk_norm is not None:
            query_key = rms_norm(query_key, weights.qk_norm, config.rms_norm_eps)
        query_key = rotate(query_key, rotation)
        return query_key[:, : config.num_heads], query_key[:, config.num_heads :], value

    def post_attention(self, layer: int, hidden: Tensor, attention_out: Tensor) -> Tensor:
        """The layer's output `[n, hidden]` from its input and `attention_out` `[n, heads, head_dim]`."""
        weights = self.layers[layer]
        hidden = hidden + linear(attention_out.flatten(1), weights.output, weights.output_bias)
        normed = rms_norm(hidden, weights.post_attention_norm, self.config.rms_norm_eps)
        gated = gated_silu(linear(normed, weights.gate_up, weights.gate_up_bias))
        return hidden + linear(gated, weights.down, weights.down_bias)

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores `[m, vocab]` float32 of the next token after each of `hidden` `[m, hidden]`."""
        return linear(rms_norm(hidden, self.final_norm, self.config.rms_norm_eps), self.lm_head).float()

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def _empty_layer(self) -> LayerWeights:
        config = self.config
        hidden, intermediate = config.hidden_size, config.intermediate_size
        normed_heads = config.num_heads + config.num_kv_heads
        return LayerWeights(
            input_norm=self._empty(hidden),
            qkv=self._empty(config.qkv_rows, hidden),
            qkv_bias=self._empty(config.qkv_rows) if config.qkv_bias else None,
            qk_norm=self._empty(normed_heads, config.head_dim) if config.qk_norm else None,
            output=self._empty(hidden, config.num_heads * config.head_dim),
            output_bias=self._empty(hidden) if config.output_bias else None,
            post_attention_norm=self._empty(hidden),
            gate_up=self._empty(2 * intermediate, hidden),
            gate_up_bias=self._empty(2 * intermediate) if config.mlp_bias else None,
            down=self._empty(hidden, intermediate),
            down_bias=self._empty(hidden) if config.mlp_bias else None,
        )
