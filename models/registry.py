"""Decoders that are ready to run: loaded from a checkpoint, or with random weights for measurements."""

import logging
from collections.abc import Mapping
from pathlib import Path

import torch

from neo_desktop.models.checkpoint import Checkpoint
from neo_desktop.models.config import ModelConfig
from neo_desktop.models.decoder import Decoder
from neo_desktop.models.json_file import ModelError
from neo_desktop.models.linear.dense import DENSE
from neo_desktop.models.linear.protocol import WeightFormat
from neo_desktop.models.operators import Operators
from neo_desktop.models.ops import Reduce
from neo_desktop.models.rank import ALONE, Rank
from neo_desktop.models.ranks import config_of_rank, weights_of_rank
from neo_desktop.models.safetensors.folder import SafetensorsFolder
from neo_desktop.models.stages import Stages
from neo_desktop.models.stored_form import what_becomes
from neo_desktop.models.stored_tensor import StoredTensor
from neo_desktop.models.traced.assistant import Pairing, pairing
from neo_desktop.models.traced.config import TracedConfig, is_assistant, of_assistant
from neo_desktop.models.traced.decoder import TracedDecoder
from neo_desktop.models.traced.sizes import Source
from neo_desktop.models.weights import BytesRead, Weights, named_weights, ties_of

logger = logging.getLogger(__name__)


def load_model(
    checkpoint: Checkpoint,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    progress: BytesRead | None = None,
    form: WeightFormat = DENSE,
    rank: Rank = ALONE,
) -> Decoder:
    """Load a checkpoint, or a rank's part; `progress(done_bytes, total_bytes)` is called after each tensor.

    Everything is checked against `config` before memory is allocated, and at most one tensor is in memory
    twice. Raises ModelError for weights that are missing, superfluous, damaged, misshapen or indivisible.
    """
    whole = check_model(checkpoint, config)
    if isinstance(config, TracedConfig) and config.of_model.most_tokens is not None:
        whole.notes.append(
            f"has a context of {config.max_context_tokens} tokens here: RoPE would change beyond that length"
        )
    for note in whole.notes if rank.number == 0 else ():
        logger.warning("%s %s", checkpoint.name, note)
    weights = weights_of_rank(whole, config, rank)
    decoder = _decoder(config_of_rank(config, rank), dtype, device, form)
    weights.load_into({weight.name: weight for weight in named_weights(decoder)}, dtype, progress)
    if weights.is_quantised:
        logger.info("%s: weights in %s, %s", checkpoint.name, weights.stored_as, what_becomes(form, dtype))
    _log_forms(decoder)
    return decoder


def check_model(checkpoint: Checkpoint, config: ModelConfig) -> Weights:
    """Compare a checkpoint's weights with its configuration, from headers alone.

    Raises ModelError for weights that are missing, superfluous, damaged or misshapen.
    """
    return _checked(config, checkpoint.weights())


def _checked(config: ModelConfig, weights: Weights) -> Weights:
    spec = _decoder(config, config.dtype, torch.device("meta"))
    expected = {weight.name: weight for weight in named_weights(spec)}
    weights.rename(config, {*expected, *ties_of(config)})
    weights.check(config, expected)
    return weights


def open_prediction(
    checkpoint: Checkpoint, config: TracedConfig, tensors: Mapping[str, StoredTensor]
) -> tuple[TracedConfig, Weights]:
    """Return the configuration and weights of a model's layer of multi-token prediction.

    Args:
        tensors: `Weights.predicting` of the checked model.

    Raises ModelError if the layer cannot be used.
    """
    own, weights = checkpoint.prediction(config, tensors)
    if own.state_shapes:
        raise ModelError(f"{checkpoint.name} predicts more tokens with recurrent layers, which cannot draft.")
    return own, _checked(own, weights)


def assistant_folder(path: Path) -> SafetensorsFolder | None:
    """Return the checkpoint of an assistant in a folder; None: the path has none."""
    return SafetensorsFolder(path) if path.is_dir() and is_assistant(path) else None


def open_assistant(
    checkpoint: SafetensorsFolder, config: ModelConfig
) -> tuple[TracedConfig, Weights, Pairing]:
    """Return the configuration and weights of an assistant, and its place beside the model of `config`.

    Raises ModelError if it cannot be used, or was made for another model.
    """
    weights, model = checkpoint.weights(), None
    if isinstance(config, TracedConfig):
        model = config.source.config().get_text_config(decoder=True)
    pair = pairing(checkpoint.name, Source(checkpoint.path).config(), model, weights.tensors)
    assert isinstance(config, TracedConfig)  # `pairing`
    own = of_assistant(checkpoint.path, config)
    if (own.num_kv_heads, own.head_dim, own.attention_scale) != (
        *(config.num_kv_heads, config.head_dim),
        config.attention_scale,
    ):
        raise ModelError(f"{checkpoint.name} has other layers than this model: choose the model's assistant.")
    return own, _checked(own, weights), pair


def load_prediction(
    config: TracedConfig, weights: Weights, main: Decoder, form: WeightFormat = DENSE
) -> TracedDecoder:
    """Load a layer of multi-token prediction or an assistant, which shares matrices with the model.

    Args:
        config: with the weights, from `open_prediction` or `open_assistant`.

    Raises ModelError for damaged weights.
    """
    decoder = TracedDecoder(config, dtype=main.dtype, device=main.device, form=form, main=main)
    weights.load_into({weight.name: weight for weight in named_weights(decoder)}, main.dtype, None)
    return decoder


def _decoder(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, form: WeightFormat = DENSE
) -> Decoder:
    if isinstance(config, TracedConfig):
        if device.type != "meta":
            logger.info("%s: no decoder here, so the one of transformers is cut", config.architecture)
        return TracedDecoder(config, dtype=dtype, device=device, form=form)
    return Decoder(config, dtype=dtype, device=device, form=form)


def stages_of(
    decoder: Decoder, operators: Operators | None, reduce: Reduce | None = None, *, has_head: bool = True
) -> Stages:
    """Return the stages of a decoder; see `Stages`.

    Args:
        operators: None: the device's own.
        reduce: sums over the ranks; None: the decoder is whole, or its part is measured alone.

    Raise ModelError if the model of transformers cannot be cut.
    """
    if isinstance(decoder, TracedDecoder):
        from neo_desktop.models.traced.stages import TracedStages  # noqa: PLC0415 - rarely needed

        return TracedStages.of(decoder, operators)
    return Stages(decoder, operators, reduce, has_head=has_head)


def random_model(
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
    form: WeightFormat = DENSE,
) -> Decoder:
    """Return a decoder with norms of 1, other weights from normal(0, 0.02); the same per seed and device."""
    decoder = Decoder(config, dtype=dtype, device=device, form=form)
    generator = torch.Generator(device).manual_seed(seed)
    for weight in named_weights(decoder):
        values = torch.ones(weight.shape, dtype=dtype, device=device)
        if not weight.name.endswith("norm.weight"):
            values.normal_(0.0, 0.02, generator=generator)
        weight.load(0, values)
    _log_forms(decoder)
    return decoder


def _log_forms(decoder: Decoder) -> None:
    *layers, head = (linear.form for linear in decoder.linears())
    logger.debug("weights of the layers: %s; of the head: %s", ", ".join(sorted(set(layers))), head)
