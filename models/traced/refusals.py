"""Error sentences for models that this engine cannot run, with a table of unsupported parts."""

import re
from typing import Any

from torch import nn

from neo_desktop.models.families import FAMILIES
from neo_desktop.models.json_file import ModelError
from neo_desktop.models.traced.capture import CannotCutError
from neo_desktop.models.traced.sizes import Source

BY_LLAMACPP = "a GGUF file of it may run by llama.cpp, with --backend llamacpp"
# Class names in a model → description. The first match counts.
_PARTS = tuple(
    (re.compile(pattern), words)
    for pattern, words in {
        r"(Kimi|BailingHybrid)\w*DeltaAttention|KimiLinearAttention": "Kimi Delta Attention layers",
        r"LightningAttention": "lightning attention layers",
        r"^(Jamba|Zamba|FalconMamba|Mamba)M": "Mamba layers of the first version (a state-space model)",
        r"Rglru": "recurrent layers (RG-LRU)",
        r"Rwkv": "RWKV's recurrent layers",
        r"^x?LSTM|xLSTM|mLSTM": "xLSTM's recurrent layers",
        r"(?<!OlmoHybrid)LinearAttention": "linear attention layers",
        r"Indexer": "sparse attention, whose tokens an indexer chooses",
        r"AltUp": "AltUp, several streams of hidden states",
        r"^(Bloom|Mpt)": "ALiBi, which adds distances to the scores of attention",
        r"Hyper(Connection|Head)": "hyper-connections between its layers",
    }.items()
)
_OTHER_PARTS = {"vision_config": "images", "audio_config": "sound", "video_config": "videos"}
_CLASS = re.compile(r"<class '(?:[\w.]+\.)?(\w+)'>")
MOST_CHARACTERS = 200  # of foreign error messages


def missing_part(model: nn.Module) -> str | None:
    """Return the description of an unsupported part; None: the table has no match."""
    classes = {type(module).__name__ for module in model.modules()}
    for pattern, words in _PARTS:
        if any(pattern.search(name) for name in classes):
            return words
    if getattr(getattr(model, "config", None), "alibi", False) is True:
        return "ALiBi, which adds distances to the scores of attention"
    return None


def not_made(source: Source, config: Any, error: Exception) -> ModelError:
    """Return the error for a configuration that transformers cannot read (None), or turn into a decoder."""
    names = getattr(config, "architectures", None) or [type(config).__name__.removesuffix("Config")]
    others = [words for key, words in _OTHER_PARTS.items() if getattr(config, key, None) is not None]
    if others:
        reads = f"{', '.join(others)} and text"
        return ModelError(
            f"{source.named} describes {_cut(str(names[0]))}, which reads {reads}, while this engine runs "
            f"text models: choose the text model of this family, if there is one; {BY_LLAMACPP}."
        )
    if config is not None and getattr(config, "is_encoder_decoder", False):
        return ModelError(
            f"{source.named} describes {_cut(str(names[0]))}, which has an encoder, while this engine runs "
            "decoders alone: choose another model."
        )
    return ModelError(
        f"{source.named} describes a model that is not supported: transformers cannot make it "
        f"({shortly(error)})."
    )


def cannot_cut(source: Source, model: Any, error: Exception) -> ModelError:
    """Return the error for a model that cannot be cut; `model`: the model or its configuration."""
    name = getattr(model, "architecture", type(model).__name__)
    part = missing_part(model) if isinstance(model, nn.Module) else None
    if part is not None:
        return ModelError(
            f"{source.named} describes {name}, which has {part}, which this engine does not support yet: "
            f"{BY_LLAMACPP}."
        )
    reason = shortly(error)
    if not isinstance(error, CannotCutError) and isinstance(model, nn.Module) and _has_experts(model):
        known = ", ".join(family.model_type for family in FAMILIES if family.experts)
        reason = f"its kind of mixture of experts is not supported; those of {known} are"
    elif not isinstance(error, CannotCutError):
        reason = f"its code cannot run without numbers ({type(error).__name__}: {reason})"
    return ModelError(
        f"{source.named} describes {name}, which cannot be cut into stages at attention: {reason}."
    )


def _has_experts(model: nn.Module) -> bool:
    return any(type(module).__name__.endswith("Experts") for module in model.modules())


def shortly(error: Exception) -> str:
    """Return the first line of a foreign message, without module paths of classes, cut between words."""
    return _cut(_CLASS.sub(r"\1", str(error).strip().split("\n")[0])).rstrip(".: ")


def _cut(text: str) -> str:
    if len(text) <= MOST_CHARACTERS:
        return text
    return f"{text[:MOST_CHARACTERS].rpartition(' ')[0] or text[:MOST_CHARACTERS]} …"
