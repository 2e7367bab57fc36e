"""A decoder's linear stages for decodes: few kernels, in place, so that a graph can hold them.

The arithmetic is `models.decoder`'s, rounding included; only the order of memory differs. Where the decoder
returns `hidden`, here `residual + x` stands for it: the sum is part of the next normalisation.
"""

import torch
from torch import Tensor

from neo_desktop.engine.execute.graphs.workspace import Scratch, SubBatchMemory
from neo_desktop.engine.kernels.dispatch import add_rms_norm, rope_append, silu_mul
from neo_desktop.models.decoder import Decoder
from neo_desktop.models.linear import Form, Linear


class FusedLayers:
    """A decoder whose intermediate results lie in a workspace.

    Args:
        decoder: on a GPU, or plain.
        scratch: used by every stage.
    """

    def __init__(self, decoder: Decoder, scratch: Scratch) -> None:
        self._decoder = decoder
        self._scratch = scratch
        self._eps = decoder.config.rms_norm_eps

    def embed(self, memory: SubBatchMemory) -> None:
        """Begin: embeddings of the tokens, and the rotation at their positions."""
        inputs = memory.inputs
        torch.index_select(self._decoder.embedding, 0, inputs.token_ids, out=memory.residual)
        memory.x.zero_()
        rotation = self._decoder.rotary(inputs.positions)
        memory.cos.copy_(rotation.cos)
        memory.sin.copy_(rotation.sin)

    def pre_attention(self, layer: int, memory: SubBatchMemory, k_cache: Tensor, v_cache: Tensor) -> None:
        """Compute q, k and v; store k and v of rows with a slot in the device's cache.

        Args:
            k_cache: [num_blocks, block_size, kv_heads, head_dim] of this layer; v_cache likewise.
        """
        weights = self._decoder.layers[layer]
        normed = self._scratch.normed[: memory.rows.count]
        add_rms_norm(memory.x, memory.residual, weights.input_norm, self._eps, normed)
        _product(weights.qkv, normed, memory.qkv)
        rope_append(
            memory.qkv,
            memory.cos,
            memory.sin,
            memory.inputs.slots,
            k_cache,
            v_cache,
            weights.qk_norm,
            self._eps,
        )

    def post_attention(self, layer: int, memory: SubBatchMemory) -> None:
        """Compute what follows the attention: its projection, and the feed-forward network."""
        weights, count = self._decoder.layers[layer], memory.rows.count
        normed, gate_up, gated = (
            tensor[:count] for tensor in (self._scratch.normed, self._scratch.gate_up, self._scratch.gated)
        )
        _product(weights.output, memory.attention.flatten(1), memory.x)
        add_rms_norm(memory.x, memory.residual, weights.post_attention_norm, self._eps, normed)
        _product(weights.gate_up, normed, gate_up)
        silu_mul(gate_up, gated)
        _product(weights.down, gated, memory.x)

    def final_norm(self, memory: SubBatchMemory, out: Tensor) -> None:
        """Normalise the last hidden states into `out` [rows, hidden]."""
        add_rms_norm(memory.x, memory.residual, self._decoder.final_norm, self._eps, out)

    def logits(self, last_hidden: Tensor, out: Tensor) -> None:
        """Compute the logits [rows, vocab] of what `final_norm` gave."""
        _product(self._decoder.lm_head, last_hidden, out)


def _product(linear: Linear, x: Tensor, out: Tensor) -> None:
    assert linear.form is Form.PLAIN  # others are for the CPU
    if linear.bias is None:
        torch.mm(x, linear.weight.t(), out=out)
    else:
        torch.addmm(linear.bias, x, linear.weight.t(), out=out)
