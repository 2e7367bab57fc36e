"""A decoder's matrices, and the weights of checkpoints in each."""

from neo_desktop.models.config import Matrix, ModelConfig
from neo_desktop.models.experts_config import expert_names
from neo_desktop.models.ties import EMBEDDING
from neo_desktop.models.traced.config import TracedConfig
from neo_desktop.models.traced.sizes import FusedSizes

_MODULES = {
    "qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "output": ["self_attn.o_proj"],
    "gate_up": ["mlp.gate_proj", "mlp.up_proj"],
    "down": ["mlp.down_proj"],
    "head": ["lm_head"],
}
"""Kind of a matrix -> its modules in Hugging Face checkpoints; `expert_names` has those of experts."""


def matrices_of(config: ModelConfig) -> list[FusedSizes]:
    """Return the matrices of a checkpoint by layer, under the names of `WeightFormat.named`."""
    if isinstance(config, TracedConfig):
        spec = config.of_model
        rows, columns = spec.parameters[spec.embedding]
        embedding = FusedSizes((spec.embedding,), (), (rows,), columns, "embedding")
        if config.source.predicts:  # the embedding is the model's; a layer's head is as well
            return [*(spec.inner_matrices if config.source.predicts == "layer" else spec.all_matrices)]
        return [embedding, *spec.all_matrices]
    embedding = FusedSizes((EMBEDDING,), (), (config.vocab_size,), config.hidden_size, "embedding")
    by_layer = sorted(config.each_matrix(), key=lambda each: _layer(each[0], config.num_layers))
    return [embedding, *(_written(config, name, matrix) for name, matrix in by_layer)]


def _layer(name: str, after: int) -> int:
    layer = name.rpartition(".")[0]
    return int(layer) if layer else after


def _written(config: ModelConfig, name: str, matrix: Matrix) -> FusedSizes:
    layer, _, kind = name.rpartition(".")
    names = expert_names(config.architecture)
    modules = _MODULES.get(kind, [f"{names.block}.{names.router}"])
    if matrix.experts:
        modules = names.of_each(kind.removeprefix("experts_"), range(matrix.experts))
    rows, kv_rows = matrix.rows // len(modules), config.num_kv_heads * config.head_dim
    return FusedSizes(
        tuple(_of_layer(layer, f"{module}.weight") for module in modules),
        tuple(_of_layer(layer, f"{module}.bias") for module in modules) if matrix.has_bias else (),
        (matrix.rows - 2 * kv_rows, kv_rows, kv_rows) if kind == "qkv" else (rows,) * len(modules),
        matrix.columns,
        name,
        matrix.experts,
    )


def _of_layer(layer: str, name: str) -> str:
    return f"model.layers.{layer}.{name}" if layer else name
