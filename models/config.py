"""The configuration of a model, read once from a checkpoint's JSON; no other module sees that JSON."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from pathlib import Path

import torch

from neo_desktop.models import limits
from neo_desktop.models.experts_config import ExpertsConfig, expert_names
from neo_desktop.models.families import described, experts_of, family_of, layer_windows, stored_dtype
from neo_desktop.models.json_file import JsonFile, ModelError
from neo_desktop.models.linear.dense import DENSE
from neo_desktop.models.linear.protocol import WeightFormat
from neo_desktop.models.matrices import EMBEDDING, HEAD, Matrix
from neo_desktop.models.rope import RopeConfig

__all__ = ["GenerationDefaults", "ModelConfig", "ModelError", "RopeConfig"]


FINAL_NORM = "model.norm.weight"
# Recommendations that the engine ignores, with the values that have no effect.
_NOT_DONE: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("typical_p", "guidance_scale", "encoder_repetition_penalty", "num_beams"), (1,)),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "no_repeat_ngram_size", "penalty_alpha"), (0,)),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "min_length", "min_new_tokens"), (0,)),
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "stop_strings"), ([],)),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "max_new_tokens", "top_h"), ()),
    **dict.fromkeys(("sequence_bias", "exponential_decay_length_penalty", "dola_layers"), ()),
    **dict.fromkeys(("watermarking_config", "force_words_ids", "constraints"), ()),
}


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Sampling parameters from generation_config.json; None: no recommendation."""

    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    ignored: tuple[str, ...] = ()  # recommendations that the engine does not follow

    @classmethod
    def from_json(cls, file: JsonFile, names: Mapping[str, str] | None = None) -> "GenerationDefaults":
        """Read the recommendations, without values outside `SAMPLING_BOUNDS`.

        Args:
            file: generation_config.json, or other metadata.
            names: parameter -> its key in the file, where they differ.

        Raise ModelError for a value of the wrong type.
        """
        keys = {name: (names or {}).get(name, name) for name in (*limits.SAMPLING_BOUNDS, "top_k")}
        given = {name: key for name, key in keys.items() if file.raw(key) is not None}
        top_k = file.integer(given.pop("top_k"), minimum=0) if "top_k" in given else None
        others = [key for key, neutral in _NOT_DONE.items() if file.raw(key) not in (None, *neutral)]
        return cls.within_bounds(
            {name: file.number(key, allow_zero=True) for name, key in given.items()},
            do_sample=None if file.raw("do_sample") is None else file.boolean("do_sample", False),
            top_k=top_k,
            ignored=tuple(f"{key} of {str(file.raw(key))[:50]}" for key in others),
        )

    @classmethod
    def within_bounds(
        cls,
        values: Mapping[str, float | None],
        do_sample: bool | None = None,
        top_k: int | None = None,
        ignored: tuple[str, ...] = (),
    ) -> "GenerationDefaults":
        """Return the defaults without values outside `SAMPLING_BOUNDS`; `ignored` names dropped values."""
        outside = [
            name
            for name, value in values.items()
            if value is not None
            and not limits.SAMPLING_BOUNDS[name][0] <= value <= limits.SAMPLING_BOUNDS[name][1]
        ]
        return cls(
            do_sample=do_sample,
            top_k=top_k,
            ignored=(*ignored, *(f"{name} of {values[name]:g}" for name in outside)),
            **{name: value for name, value in values.items() if name not in outside},
        )


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only transformer: sizes, and the flags in which the families differ."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_context_tokens: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    layer_windows: tuple[int | None, ...]  # tokens each layer attends to, itself included; None = all
    dtype: torch.dtype  # as stored in the checkpoint
    qkv_bias: bool = False
    output_bias: bool = False  # of the attention's output projection
    mlp_bias: bool = False
    qk_norm: bool = False  # RMS norm over each head of q and k, before the rotation
    attention_sinks: bool = False  # a learned score per head, of a key without value
    attention_softcap: float | None = None  # scores s become softcap * tanh(s / softcap)
    kv_parts: int = 2  # of a token's KV: keys and values, or 1: keys whose first numbers are the values
    experts: ExpertsConfig | None = None
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    generation: GenerationDefaults = GenerationDefaults()
    state_shapes: tuple[tuple[int, ...], ...] = ()  # a request's states in recurrent layers, float32
    depth: int = 0  # layers, those without attention included; 0: all have attention
    table: tuple[Matrix, ...] = ()  # matrices, where they are not those of the decoder here

    @classmethod
    def from_pretrained(cls, path: Path) -> "ModelConfig":
        """Read config.json and, if present, generation_config.json of a Hugging Face folder.

        Raises ModelError for a missing or broken file and for an unsupported model.
        """
        if not path.is_dir():
            raise ModelError(f"{path} is not a folder: point at a downloaded Hugging Face model folder.")
        config, generation = cls.from_json(JsonFile.read(path / "config.json")), generation_file(path)
        return replace(
            config,
            eos_token_ids=generation.token_ids("eos_token_id", ()) or config.eos_token_ids,
            generation=GenerationDefaults.from_json(generation),
        )

    @classmethod
    def from_json(cls, file: JsonFile, unsupported: type[ModelError] = ModelError) -> "ModelConfig":
        """Read a config.json. Raise ModelError if it is broken, `unsupported` for sizes without a kernel."""
        family = family_of(file)
        file = described(file, family)

        num_layers = file.integer("num_hidden_layers", maximum=limits.MAX_LAYERS)
        hidden_size = file.integer("hidden_size", maximum=limits.MAX_HIDDEN_SIZE)
        num_heads = file.integer("num_attention_heads", maximum=limits.MAX_HEADS)
        head_dim = file.integer("head_dim", max(hidden_size // num_heads, 1), maximum=limits.MAX_HEAD_DIM)
        num_kv_heads = file.integer("num_key_value_heads", num_heads, maximum=limits.MAX_HEADS)
        check_heads(file.path, num_heads, num_kv_heads, head_dim, unsupported)
        trained_tokens = file.integer("max_position_embeddings")
        rope = RopeConfig.from_config(file, trained_tokens, head_dim)
        # Qwen's model cards tell users to enable YaRN and to leave max_position_embeddings unchanged.
        max_context_tokens = min(max(trained_tokens, rope.stretched_tokens), limits.MAX_CONTEXT_TOKENS)
        attention_bias = file.boolean("attention_bias", False)
        return cls(
            architecture=family.architecture,
            vocab_size=file.integer("vocab_size", maximum=limits.MAX_VOCAB_SIZE),
            hidden_size=hidden_size,
            intermediate_size=file.integer("intermediate_size", maximum=limits.MAX_INTERMEDIATE_SIZE),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_context_tokens=max_context_tokens,
            rms_norm_eps=file.number("rms_norm_eps"),
            rope=rope,
            tie_word_embeddings=file.boolean("tie_word_embeddings"),
            # A window as long as the context has no effect.
            layer_windows=tuple(
                window if window is not None and window < max_context_tokens else None
                for window in layer_windows(file, family, num_layers)
            ),
            dtype=stored_dtype(file, family.dtype),
            qkv_bias=family.qkv_bias or attention_bias,
            output_bias=attention_bias,
            mlp_bias=file.boolean("mlp_bias", False),
            qk_norm=family.qk_norm,
            attention_sinks=family.attention_sinks,
            experts=experts_of(file, family, num_layers, hidden_size, unsupported),
            eos_token_ids=file.token_ids("eos_token_id", ()),
            bos_token_id=next(iter(file.token_ids("bos_token_id", ())), None),
        )

    @property
    def group_size(self) -> int:
        """Query heads that share one key-value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def attention_scale(self) -> float:
        """Factor on q·k before the softmax."""
        return float(self.head_dim**-0.5)

    @property
    def carried_width(self) -> int:
        """Elements of the hidden state that one layer passes to the next, per token."""
        return self.hidden_size

    @property
    def num_layers_in_all(self) -> int:
        """Layers, those without attention included."""
        return self.depth or self.num_layers

    @property
    def state_bytes(self) -> int:
        return sum(4 * prod(shape) for shape in self.state_shapes)

    @property
    def rotation_width(self) -> int:
        """Elements per token of cos, and of sin."""
        return self.head_dim

    @property
    def qkv_heads(self) -> int:
        """Heads of a token's queries, keys and values together."""
        return self.num_heads + self.kv_parts * self.num_kv_heads

    @property
    def qkv_rows(self) -> int:
        """Rows of the fused query, key and value matrix: (heads + kv_parts * kv_heads) * head_dim."""
        return self.qkv_heads * self.head_dim

    @property
    def all_matrices(self) -> tuple[Matrix, ...]:
        """The embedding, the layers' matrices in the order of their use, and an untied head."""
        return self.table or _written_matrices(self)

    @property
    def own_matrices(self) -> tuple[Matrix, ...]:
        """Matrices with weights in the model's checkpoint."""
        return self.all_matrices

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name in checkpoints -> shape of a weight, for weights that are not matrices."""
        found: dict[str, tuple[int, ...]] = {}
        for layer in range(self.num_layers_in_all):
            prefix = f"model.layers.{layer}."
            found[f"{prefix}input_layernorm.weight"] = (self.hidden_size,)
            found[f"{prefix}post_attention_layernorm.weight"] = (self.hidden_size,)
            if self.qk_norm:
                found[f"{prefix}self_attn.q_norm.weight"] = (self.head_dim,)
                found[f"{prefix}self_attn.k_norm.weight"] = (self.head_dim,)
            if self.attention_sinks:
                found[f"{prefix}self_attn.sinks"] = (self.num_heads,)
        return found | {FINAL_NORM: (self.hidden_size,)}

    @property
    def wide_tensors(self) -> tuple[str, ...]:
        """Tensors that stay in float32."""
        return ()

    def each_matrix(self) -> Iterator[tuple[str, Matrix]]:
        """Yield each matrix but the embedding and other tables, with its name."""
        for matrix in self.all_matrices:
            if matrix.name != "embedding" and not matrix.is_table:
                yield matrix.name, matrix

    @property
    def num_parameters(self) -> int:
        """Distinct parameters; tied embeddings count once."""
        matrices = sum(matrix.num_weights for matrix in self.all_matrices)
        return matrices + sum(prod(shape) for shape in self.tensors.values())

    @property
    def active_parameters(self) -> int:
        """Parameters that one token uses; only the experts of its routing count."""
        mixtures = [matrix for matrix in self.all_matrices if matrix.experts]
        idle = (each.num_weights // each.experts * (each.experts - each.per_token) for each in mixtures)
        return self.num_parameters - sum(idle)

    def weight_bytes(self, dtype: torch.dtype, form: WeightFormat = DENSE) -> int:
        """Return the bytes of the weights on the compute device in `dtype`, with matrices in this format."""
        others, in_form = self.num_parameters, 0
        for matrix in self.all_matrices:
            others -= matrix.rows * matrix.columns
            if not matrix.is_table or form.tables is None:
                in_form += form.named(matrix.name).nbytes(matrix.rows, matrix.columns, dtype)
        return others * dtype.itemsize + in_form

    def table_bytes(self, dtype: torch.dtype, form: WeightFormat) -> int:
        """Return the bytes of tables in host memory beside a GPU."""
        if form.tables is None:
            return 0
        tables = (matrix for matrix in self.all_matrices if matrix.is_table)
        return sum(form.named(each.name).nbytes(each.rows, each.columns, dtype) for each in tables)

    def loading_bytes(self, dtype: torch.dtype, device: torch.device, form: WeightFormat = DENSE) -> int:
        """Return the peak bytes of loading: the weights, and the largest overhead of loading one matrix."""
        more = (
            form.named(name).loading_bytes(m.rows, m.columns, dtype, device) for name, m in self.each_matrix()
        )
        return self.weight_bytes(dtype, form) + max(more, default=0)

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Return the bytes of one token's keys and values in all layers."""
        return self.kv_parts * self.num_layers * self.num_kv_heads * self.head_dim * dtype.itemsize

    def attended_tokens(self, context: int) -> float:
        """Return the tokens of a context that a layer attends to, on average over the layers."""
        return sum(min(context, window or context) for window in self.layer_windows) / self.num_layers


@lru_cache(maxsize=64)  # mixtures have thousands of names
def _written_matrices(config: ModelConfig) -> tuple[Matrix, ...]:
    """Return the matrices of the project's own decoder."""
    hidden, inner, experts = config.hidden_size, config.intermediate_size, config.experts
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    names = expert_names(config.architecture)
    is_table = not config.tie_word_embeddings
    matrices = [Matrix("embedding", (EMBEDDING,), (config.vocab_size,), hidden, is_table=is_table)]

    def add(name: str, modules: Sequence[str], rows: tuple[int, ...], columns: int, has_bias: bool) -> None:
        prefix = f"model.layers.{name.partition('.')[0]}."
        weights = tuple(f"{prefix}{module}.weight" for module in modules)
        biases = tuple(f"{prefix}{module}.bias" for module in modules) if has_bias else ()
        matrices.append(Matrix(name, weights, rows, columns, biases))

    for layer in range(config.num_layers):
        projections = [f"self_attn.{part}_proj" for part in "qkv"]
        add(f"{layer}.qkv", projections, (q, kv, kv), hidden, config.qkv_bias)
        add(f"{layer}.output", ["self_attn.o_proj"], (hidden,), q, config.output_bias)
        if experts is None or layer not in experts.layers:
            gates_and_ups = ["mlp.gate_proj", "mlp.up_proj"]
            add(f"{layer}.gate_up", gates_and_ups, (inner, inner), hidden, config.mlp_bias)
            add(f"{layer}.down", ["mlp.down_proj"], (hidden,), inner, config.mlp_bias)
            continue
        router, width = f"{names.block}.{names.router}", experts.intermediate_size
        add(f"{layer}.router", [router], (experts.count,), hidden, experts.router_bias)
        for kind, rows, columns in (("gate", width, hidden), ("up", width, hidden), ("down", hidden, width)):
            modules = names.of_each(kind, range(experts.count))
            add(f"{layer}.experts_{kind}", modules, (rows,) * experts.count, columns, experts.bias)
            matrices[-1] = replace(matrices[-1], experts=experts.count, per_token=experts.per_token)
    head = [] if config.tie_word_embeddings else [Matrix("head", (HEAD,), (config.vocab_size,), hidden)]
    return (*matrices, *head)


def check_heads(
    path: Path,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    unsupported: type[ModelError] = ModelError,
) -> None:
    """Raise ModelError for impossible head sizes, `unsupported` for sizes without a kernel."""
    if num_heads % num_kv_heads:
        raise ModelError(f"{path}: {num_heads} heads cannot share {num_kv_heads} key-value heads.")
    if head_dim % 2:
        raise ModelError(f"{path}: a head_dim of {head_dim} is odd and cannot be rotated in pairs.")
    if head_dim % limits.HEAD_UNIT or head_dim > limits.LARGEST_HEAD:
        raise unsupported(
            f"{path}: heads of {head_dim} numbers are not supported; attention is computed for multiples "
            f"of {limits.HEAD_UNIT} up to {limits.LARGEST_HEAD}."
        )


def generation_file(path: Path) -> JsonFile:
    """Return a folder's generation_config.json; empty if the file is missing."""
    file = path / "generation_config.json"
    return JsonFile.read(file) if file.exists() else JsonFile(file, {})
