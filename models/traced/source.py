"""What tells `transformers` what a model is like."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from logging import ERROR
from pathlib import Path
from typing import Any

from neo_desktop.models.json_file import INSTALL_TRANSFORMERS, ModelError
from neo_desktop.models.limits import MAX_CONTEXT_TOKENS

# Attributes of configurations with the number of positions; most classes map their own name to the first.
_CONTEXT = ("max_position_embeddings", "max_seq_len", "max_target_positions", "seq_length")
_UNKNOWN_CONTEXT = 2048


@dataclass(frozen=True, slots=True)
class Source:
    """A folder with a config.json, or a file of which the same is known.

    Args:
        path: of the folder, or of the file.
        config_json: of a file: what a config.json would say; None: it is a folder.
    """

    path: Path
    config_json: str | None = None

    @property
    def named(self) -> Path:
        """Return what errors name."""
        return self.path / "config.json" if self.config_json is None else self.path

    def config(self) -> Any:
        """Return the configuration; raises whatever transformers raises, ImportError where it is missing."""
        from transformers import AutoConfig  # noqa: PLC0415 - large, and rarely needed

        if self.config_json is None:
            return AutoConfig.from_pretrained(self.path, local_files_only=True, trust_remote_code=False)
        return AutoConfig.for_model(**json.loads(self.config_json))


@contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers' advice to itself."""
    from transformers.utils import logging  # noqa: PLC0415 - large, and rarely needed

    before = logging.get_verbosity()
    logging.set_verbosity(ERROR)
    try:
        yield
    finally:
        logging.set_verbosity(before)


@dataclass(frozen=True, slots=True)
class Description:
    """The entries of a configuration that are not seen in a model's code.

    Args:
        context_tokens: positions that the model has.
        bos_token_ids: none, or one.
        eos_token_ids: after which it stops.
    """

    context_tokens: int
    bos_token_ids: tuple[int, ...]
    eos_token_ids: tuple[int, ...]


@lru_cache(maxsize=32)
def description(source: Source, _modified_ns: int) -> Description:
    """Return the entries of the part of a configuration that is about text.

    Raises:
        ModelError: transformers is not installed, or does not know the model.
    """
    config = configuration(source)
    text = config.get_text_config(decoder=True)
    contexts = [getattr(text, name, None) for name in _CONTEXT]
    context = next((each for each in contexts if type(each) is int), _UNKNOWN_CONTEXT)
    for rope in _rotations(text):
        if rope.get("rope_type") == "longrope":  # rotates otherwise in longer contexts
            original = getattr(text, "original_max_position_embeddings", None)
            context = min(context, original or rope.get("original_max_position_embeddings") or context)
    if not 1 <= context <= MAX_CONTEXT_TOKENS:
        raise ModelError(f"{source.named} has a context of {context} tokens: correct the file.")

    def ids(name: str) -> tuple[int, ...]:
        for each in (config, text):
            value = getattr(each, name, None)
            found = value if isinstance(value, list) else [value]
            if all(type(token) is int and 0 <= token < text.vocab_size for token in found):
                return tuple(found)
        return ()

    return Description(context, ids("bos_token_id")[:1], ids("eos_token_id"))


def configuration(source: Source) -> Any:
    """Return what transformers makes of a description.

    Raises:
        ModelError: transformers is not installed, or does not know the model.
    """
    try:
        with quiet():
            return source.config()
    except ImportError:
        raise ModelError(
            f"{source.named} describes a model that only transformers knows: {INSTALL_TRANSFORMERS}, or "
            "choose another model."
        ) from None
    except Exception as error:  # of whatever kind: it is other people's code
        said = str(error).strip().split("\n")[0][:100].rstrip(".")
        raise ModelError(
            f"{source.named} describes a model that is not supported: transformers cannot make it ({said})."
        ) from None


def _rotations(text: Any) -> list[dict[str, Any]]:
    """Return the parameters of rotations: one for all layers, or several."""
    rope = getattr(text, "rope_parameters", None) or {}
    several = [each for each in rope.values() if isinstance(each, dict)]
    return several or [rope]


def fix_rotations(model: Any) -> None:
    """Keep the frequencies of positions within the context, which others than `default` may change.

    `dynamic` changes them beyond the context, `longrope` beyond the original one: see `description`.
    """
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if isinstance(kind, str) and _changes(kind):
            module.rope_type = "default"
        elif isinstance(kind, dict):
            module.rope_type = {key: "default" if _changes(each) else each for key, each in kind.items()}


def _changes(kind: object) -> bool:
    return isinstance(kind, str) and ("dynamic" in kind or kind == "longrope")
