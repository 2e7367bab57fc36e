"""Layers of packed weights on a CPU: one native call computes everything between the attention of two layers.

It wakes the threads once. The results are those of the separate matmuls and operators.
"""

from torch import Tensor

from neo_desktop import native
from neo_desktop.models.decoder import Decoder, GatedMLP, LayerWeights
from neo_desktop.models.given_rows import GIVEN, given_buffers
from neo_desktop.models.linear.packed import PackedMatrix
from neo_desktop.native import Buffer, Columns, RowProgram, Step

MAX_ROWS = 32  # their quantised form fits a core's caches; for more rows, separate matmuls are as fast

_RESIDUAL, _X, _QKV, _ATTENTION, _COS, _SIN = (Columns(buffer) for buffer in GIVEN)
_NORMED, _GATE_UP, _GATED = (Columns(len(GIVEN) + i) for i in range(3))


class PackedLayers:
    """The native programs between the attention of two layers.

    Args:
        decoder: has packed matrices only, and no experts.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._programs: dict[tuple[int | None, int | None], RowProgram] = {}

    @classmethod
    def of(cls, decoder: Decoder) -> "PackedLayers | None":
        """Return the programs of a decoder; None: some matrices are not packed."""
        matrices = (matrix for layer in decoder.layers for matrix in (layer.qkv, layer.output, *_mlp(layer)))
        return cls(decoder) if all(isinstance(matrix, PackedMatrix) for matrix in matrices) else None

    def advance(self, finished: int | None, begun: int | None, given: list[native.View]) -> None:
        """Run the program between two layers, see `Stages.advance`; given: from `State.seen_by_native`."""
        place = finished, begun
        if place not in self._programs:
            self._programs[place] = self._program(finished, begun)
        self._programs[place].run(given)

    def _program(self, finished: int | None, begun: int | None) -> RowProgram:
        config, dtype = self._decoder.config, self._decoder.dtype
        hidden, intermediate = config.hidden_size, config.intermediate_size
        own = (Buffer(width, dtype) for width in (hidden, 2 * intermediate, intermediate))
        buffers = [*given_buffers(config, dtype), *own]

        def multiply(x: Columns, matrix: object, out: Columns) -> Step:
            assert isinstance(matrix, PackedMatrix)
            columns, rows = buffers[x.buffer].width, buffers[out.buffer].width
            return Step("multiply", (x,), out, rows, groups=columns, matrix=matrix.native)

        def normalise(weight: Tensor) -> Step:
            eps = config.rms_norm_eps
            return Step("add_rms_norm", (_RESIDUAL, _X), _NORMED, hidden, number=eps, weights=(weight,))

        steps: list[Step] = []
        if finished is not None:
            layer = self._decoder.layers[finished]
            gate_up, down = _mlp(layer)
            steps += [
                multiply(_ATTENTION, layer.output, _X),
                normalise(layer.post_attention_norm),
                multiply(_NORMED, gate_up, _GATE_UP),
                Step("silu_mul", (_GATE_UP,), _GATED, intermediate),
                multiply(_GATED, down, _X),
            ]
        if begun is not None:
            layer = self._decoder.layers[begun]
            head_dim = config.head_dim
            rotate = Step(
                "rope",
                (_COS, _SIN),
                Columns(_QKV.buffer, 0, head_dim),
                head_dim,
                groups=config.num_heads + config.num_kv_heads,
                number=config.rms_norm_eps,
                weights=() if layer.qk_norm is None else (layer.qk_norm,),
            )
            steps += [normalise(layer.input_norm), multiply(_NORMED, layer.qkv, _QKV), rotate]
        return RowProgram(buffers, steps)


def _mlp(layer: LayerWeights) -> tuple[object, object]:
    mlp = layer.mlp
    return (mlp.gate_up, mlp.down) if isinstance(mlp, GatedMLP) else (None, None)
