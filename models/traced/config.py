"""The configuration of a model whose stages are cut out of the code of `transformers`."""

from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from neo_desktop.models import limits
from neo_desktop.models.config import GenerationDefaults, ModelConfig, check_heads, generation_file
from neo_desktop.models.experts_config import ExpertsConfig
from neo_desktop.models.families import stored_dtype, written_family
from neo_desktop.models.json_file import JsonFile, ModelError, NotWrittenError
from neo_desktop.models.matrices import Matrix
from neo_desktop.models.rope import RopeConfig
from neo_desktop.models.safetensors.scheme import read_scheme
from neo_desktop.models.traced.sizes import NOTHING, Source, TracedSpec

_STATED = ("architecture", "dtype", "eos_token_ids", "bos_token_id", "generation")
_ASSISTANTS = ("gemma4_assistant", "gemma4_unified_assistant")  # model types; see `assistant`
ROTATIONS = 4  # width of position-dependent values, in heads: cos and sin of two rotations


@dataclass(frozen=True)
class TracedConfig(ModelConfig):
    """A `ModelConfig`; the fields of the project's own decoders are empty."""

    source: Source = Source(Path())  # noqa: RUF009 - frozen
    of_model: TracedSpec = NOTHING

    @property
    def attention_scale(self) -> float:
        return float(self.of_model.scale)

    @property
    def carried_width(self) -> int:
        return self.of_model.carried_width

    @property
    def rotation_width(self) -> int:
        return ROTATIONS * self.head_dim

    @property
    def all_matrices(self) -> tuple[Matrix, ...]:
        spec = self.of_model
        (rows, columns), name = spec.parameters[spec.embedding], (spec.embedding,)
        embedding = Matrix("embedding", name, (rows,), columns, is_table=spec.head is not None)
        return embedding, *spec.tables, *spec.all_matrices

    @property
    def own_matrices(self) -> tuple[Matrix, ...]:
        # What predicts has the embedding of the model, and a layer of multi-token prediction also its head.
        if not self.source.predicts:
            return self.all_matrices
        spec = self.of_model
        return *spec.tables, *(spec.inner_matrices if self.source.predicts == "layer" else spec.all_matrices)

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        of_model = self.of_model
        return {name: shape for name, shape in of_model.parameters.items() if name != of_model.embedding}

    @property
    def wide_tensors(self) -> tuple[str, ...]:
        return self.of_model.wide


def read_config(path: Path) -> ModelConfig:
    """Read a folder's configuration, for the project's own decoder or for the code of transformers.

    The own decoder serves models that it supports completely; the code of transformers serves the others.

    Raises:
        ModelError: see `ModelConfig.from_pretrained` and `read_traced`.
    """
    config_json = path / "config.json"
    if path.is_dir() and config_json.exists() and written_family(JsonFile.read(config_json)) is None:
        return read_traced(path)
    try:
        return ModelConfig.from_pretrained(path)
    except NotWrittenError as error:
        if find_spec("transformers") is None:
            raise
        not_written = error.reason
    try:
        return read_traced(path)
    except ModelError as error:
        raise ModelError(f"{not_written} The code of transformers does not help: {error}") from None


def is_assistant(path: Path) -> bool:
    """Return True if a folder holds an assistant, which only drafts for another model."""
    config_json = path / "config.json"
    return config_json.is_file() and JsonFile.read(config_json).raw("model_type") in _ASSISTANTS


def read_traced(path: Path) -> TracedConfig:
    """Read a folder's configuration for the code of `transformers`.

    Raise ModelError if the folder is broken, transformers is not installed or does not know the model, or it
    cannot cut the model into stages.
    """
    config_json = path / "config.json"
    file = JsonFile.read(config_json)
    if is_assistant(path):
        raise ModelError(
            f"{config_json} describes an assistant, which only drafts for a Gemma 4 model: load that model, "
            "and name this one as its draft_model."
        )
    read_scheme(file, has_experts_in_one=False)
    text = file.section("text_config") or file
    # Check sizes before anything is allocated.
    for key, most in (
        ("num_hidden_layers", limits.MAX_LAYERS),
        ("hidden_size", limits.MAX_HIDDEN_SIZE),
        ("num_attention_heads", limits.MAX_HEADS),
        ("vocab_size", limits.MAX_VOCAB_SIZE),
        ("max_position_embeddings", limits.MAX_CONTEXT_TOKENS),
    ):
        for section in (file, text):
            if key in section:
                section.integer(key, maximum=most)
    from neo_desktop.models.traced.spec import spec  # noqa: PLC0415 - rarely needed

    source, generation, names = Source(path), generation_file(path), file.raw("architectures")
    described = spec(source)
    return traced_config(
        source,
        architecture=str(names[0] if isinstance(names, list) and names else file.raw("model_type")),
        dtype=stored_dtype(file, text.text("dtype", text.text("torch_dtype", "float32"))),
        eos_token_ids=generation.token_ids("eos_token_id", ()) or described.eos_token_ids,
        bos_token_id=next(iter(described.bos_token_ids), None),
        generation=GenerationDefaults.from_json(generation),
    )


def traced_config(source: Source, **stated: Any) -> TracedConfig:
    """Return a model's configuration, completed from its code.

    Args:
        stated: the fields of `ModelConfig` that the code does not determine, see `_STATED`.

    Raise ModelError if transformers is not installed or does not know the model, or it cannot be cut into
    stages.
    """
    from neo_desktop.models.traced.spec import spec  # noqa: PLC0415 - rarely needed

    found = spec(source)
    check_heads(source.named, found.heads, found.kv_heads, found.head_dim)
    max_context_tokens = min(found.context_tokens, found.most_tokens or found.context_tokens)
    return TracedConfig(
        vocab_size=found.vocab_size,
        hidden_size=found.hidden_size,
        intermediate_size=0,
        num_layers=len(found.windows),
        num_heads=found.heads,
        num_kv_heads=found.kv_heads,
        head_dim=found.head_dim,
        max_context_tokens=max_context_tokens,
        rms_norm_eps=0.0,
        rope=RopeConfig(theta=1.0),
        tie_word_embeddings=found.head is None,
        layer_windows=tuple(
            window if window and window < max_context_tokens else None for window in found.windows
        ),
        attention_sinks=bool(found.sinks),
        attention_softcap=found.softcap,
        experts=_experts(found),
        kv_parts=found.kv_parts,
        state_shapes=found.states,
        source=source,
        of_model=found,
        **stated,
    )


def _experts(found: TracedSpec) -> ExpertsConfig | None:
    """Return the sizes of the experts, with one layer number per mixture, in order.

    None: there are no experts, or the mixtures differ, so that all experts are on the device.
    """
    sizes = {moe.config for moe in found.moe_layers}
    if len(sizes) != 1 or {moe.hidden_size for moe in found.moe_layers} != {found.hidden_size}:
        return None
    return replace(sizes.pop(), layers=tuple(range(len(found.moe_layers))))


def of_assistant(path: Path, config: TracedConfig) -> TracedConfig:
    """Return the configuration of a model's assistant in a folder; raises as `traced_config`."""
    return traced_config(Source(path, predicts="assistant"), **_stated(config))


def with_long_factors(config: ModelConfig) -> ModelConfig:
    """Return a LongRoPE model's configuration with its whole context; other models' stay as they are."""
    if not isinstance(config, TracedConfig) or config.of_model.most_tokens is None:
        return config
    return with_source(config, is_long=True)


def with_source(config: TracedConfig, **changes: Any) -> TracedConfig:
    """Return the configuration with changes of its `Source`; raises as `traced_config`."""
    return traced_config(replace(config.source, **changes), **_stated(config))


def _stated(config: TracedConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in _STATED}
