"""Layers of packed weights on a CPU: all that lies between the attention of two layers is one native call.

Threads are woken once for it. The numbers are those of the single products and operators.
"""

from neo_desktop.models.decoder import Decoder, GatedMLP
from neo_desktop.models.linear.packed import PackedMatrix
from neo_desktop.native import PackedLayer, packed_layer

MAX_ROWS = 32  # whose quantised form stays in a core's caches; of more, single products are as fast


def packed_layers(decoder: Decoder) -> list[PackedLayer] | None:
    """Return the layers as `native.advance` takes them; None: not all of their matrices are packed."""
    layers = []
    for layer in decoder.layers:
        if not isinstance(layer.mlp, GatedMLP):
            return None
        qkv, output, gate_up, down = layer.qkv, layer.output, layer.mlp.gate_up, layer.mlp.down
        if not (
            isinstance(qkv, PackedMatrix)
            and isinstance(output, PackedMatrix)
            and isinstance(gate_up, PackedMatrix)
            and isinstance(down, PackedMatrix)
        ):
            return None
        layers.append(
            packed_layer(
                layer.input_norm,
                qkv.native,
                layer.qk_norm,
                output.native,
                layer.post_attention_norm,
                gate_up.native,
                down.native,
                decoder.config.rms_norm_eps,
            )
        )
    return layers
