"""What a model's folder holds, from headers only: in milliseconds, whatever somebody put there."""

import json
import math
import os
import struct
from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from neo_desktop.app.llamacpp.choice import is_installed
from neo_desktop.models.config import ModelConfig
from neo_desktop.models.gguf.checkpoint import GGUFCheckpoint, gguf_files, split_files
from neo_desktop.models.gguf.container import GGUFFile
from neo_desktop.models.json_file import ModelError, UnsupportedModelError
from neo_desktop.models.missing import is_model_folder, why_no_model
from neo_desktop.models.registry import check_model
from neo_desktop.models.safetensors.folder import SafetensorsFolder
from neo_desktop.models.stored_form import StoredForm, stored_form
from neo_desktop.models.traced.config import TracedConfig

MAX_JSON_BYTES = 4 << 20  # of config.json; real ones have a few kilobytes
MAX_HEADER_BYTES = 32 << 20  # of one safetensors file
MAX_WEIGHT_FILES = 512
MAX_LAYERS = 1024  # a thousand is more than any model has; a list of them is made per model
_BITS = {"F64": 64, "F32": 32, "I32": 32, "F16": 16, "BF16": 16}  # of a stored number; 8 of all others
_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8", "F8_E5M2": "float8"}
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")


@dataclass(frozen=True, slots=True)
class Summary:
    """One model."""

    path: Path
    size_bytes: int  # of its files
    dtype: str | None  # "bfloat16", "gptq, 4 bits"; None: unknown
    architecture: str | None
    parameters: int | None  # as stored; a matrix with packed numbers counts its stored elements
    context_tokens: int | None
    config: ModelConfig | None  # None: this program cannot run it
    reason: str | None  # why it cannot be run; None: it can
    is_quantised: bool = False  # its weights have less than 16 bits
    form: StoredForm = StoredForm()  # noqa: RUF009 - frozen; in which a CPU keeps them
    needs_llamacpp: bool = False  # the engine has not what it needs, llama.cpp may have it

    @property
    def is_by_transformers(self) -> bool:
        """Whether its stages are cut out of the code of transformers: there is no decoder of our own."""
        return isinstance(self.config, TracedConfig)


class _UnusableError(Exception):
    """Why a model cannot be run, in a sentence."""


def summarize(path: Path) -> Summary:
    """Look at one folder, or at a GGUF file; never raises for what is in it."""
    size_bytes, names = _files(path)
    empty = Summary(path, size_bytes, None, None, None, None, None, None)
    if path.is_file():
        return _gguf_summary(empty, path)
    has_safetensors = any(name.endswith((".safetensors", *_PICKLES)) for name in names)
    models = [] if has_safetensors else gguf_files(path)
    if len(models) == 1:
        return _gguf_summary(empty, models[0])
    try:
        if models:
            raise _UnusableError(f"it has {len(models)} GGUF models: name the file that is meant")
        if not is_model_folder(path):
            raise _UnusableError(why_no_model(path))
        if "config.json" not in names:
            if "adapter_config.json" in names:
                raise _UnusableError("it is an adapter of PEFT: merge it into its base model")
            raise _UnusableError("it has no config.json: complete the download")
        raw = _read_json(path / "config.json")
    except _UnusableError as error:
        return replace(empty, reason=str(error))
    found = replace(
        empty,
        architecture=_architecture(raw),
        context_tokens=_positive(raw.get("max_position_embeddings")),
        dtype=_config_dtype(raw),
    )
    try:
        parameters, stored = _weights(path, names)
        found = replace(found, parameters=parameters)
        if found.dtype is None:
            found = replace(found, dtype=_NAMES.get(stored, stored))
        config = _config(path, raw)
        if "quantization_config" in raw or "compression_config" in raw:
            found = _checked(found, path, config)
        elif not _are_all(config, parameters, stored):
            found = replace(_checked(found, path, config), dtype=found.dtype)
        if "tokenizer.json" not in names:
            raise _UnusableError("it has no tokenizer.json: complete the download")
    except _UnusableError as error:
        return replace(found, reason=str(error))
    return replace(found, context_tokens=config.max_context_tokens, config=config)


def _files(path: Path) -> tuple[int, frozenset[str]]:
    """Sizes of all files of a folder together, and their names; of a file, its own and that of its parts."""
    if path.is_file():
        parts = split_files(path)
        return sum(part.stat().st_size for part in parts if part.exists()), frozenset()
    size_bytes, names = 0, set()
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                try:
                    if entry.is_file():  # also through a link: the hub's cache consists of links
                        size_bytes += entry.stat().st_size
                        names.add(entry.name)
                except OSError:
                    continue  # a link to nowhere, or to itself
    except OSError:
        pass
    return size_bytes, frozenset(names)


def _gguf_summary(empty: Summary, path: Path) -> Summary:
    """Of a GGUF file, whose metadata are read once until it changes."""
    try:
        status = path.stat()
        found = _gguf_facts(path, status.st_size, status.st_mtime_ns)
    except ModelError as error:
        needs_llamacpp = isinstance(error, UnsupportedModelError)
        reason = str(error).replace(f"{path.parent}/", "").rstrip(".")
        architecture, context_tokens = _described(path) if needs_llamacpp else (None, None)
        return replace(
            empty,
            dtype="GGUF",
            architecture=architecture,
            context_tokens=context_tokens,
            reason=None if needs_llamacpp and is_installed() else reason,
            needs_llamacpp=needs_llamacpp,
        )
    except Exception as error:  # of whatever kind: what somebody wrote there is not to stop a list
        return replace(
            empty, dtype="GGUF", reason=f"{path.name} cannot be used ({type(error).__name__}: {error})"
        )
    return replace(found, path=empty.path, size_bytes=empty.size_bytes)


def _described(path: Path) -> tuple[str | None, int | None]:
    """Architecture and context of a file that the engine cannot run, as far as it can be read."""
    try:
        metadata = GGUFFile(split_files(path)[0]).metadata
    except ModelError:  # with tensors of unknown types, say
        return None, None
    name = metadata.get("general.architecture")
    if not isinstance(name, str):
        return None, None
    return name[:100], _positive(metadata.get(f"{name}.context_length"))


@lru_cache(maxsize=512)
def _gguf_facts(path: Path, _size_bytes: int, _modified_ns: int) -> Summary:
    checkpoint = GGUFCheckpoint(path)
    config = checkpoint.config()
    weights = check_model(checkpoint, config)
    checkpoint.check_tokenizer()
    return Summary(
        path=path,
        size_bytes=0,
        dtype=weights.stored_as,
        architecture=config.architecture,
        parameters=config.num_parameters,
        context_tokens=config.max_context_tokens,
        config=config,
        reason=None,
        is_quantised=weights.is_quantised,
        form=stored_form(weights, config),
    )


def _read_json(file: Path) -> dict[str, Any]:
    try:
        if file.stat().st_size > MAX_JSON_BYTES:
            raise _UnusableError(f"its {file.name} is too large to be one")
        values = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise _UnusableError(f"its {file.name} cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError):
        raise _UnusableError(f"its {file.name} is not valid JSON: download it again") from None
    if not isinstance(values, dict):
        raise _UnusableError(f"its {file.name} holds no JSON object: download it again")
    return values


def _architecture(raw: dict[str, Any]) -> str | None:
    names = raw.get("architectures")
    if isinstance(names, list) and names and isinstance(names[0], str):
        return names[0][:100]
    kind = raw.get("model_type")
    return kind[:100] if isinstance(kind, str) else None


def _config_dtype(raw: dict[str, Any]) -> str | None:
    """How the weights are quantized; None: they are not."""
    quantization = raw.get("quantization_config")
    if not isinstance(quantization, dict):
        return None
    method = quantization.get("quant_method")
    bits = _positive(quantization.get("bits"))
    return f"{method if isinstance(method, str) else 'quantized'}"[:40] + (f", {bits} bits" if bits else "")


def _positive(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**40 else None


def _config(path: Path, raw: dict[str, Any]) -> ModelConfig:
    """The configuration, once it is known to be harmless."""
    layers = raw.get("num_hidden_layers")
    if isinstance(layers, int) and layers > MAX_LAYERS:
        raise _UnusableError(f"its config.json asks for {layers} layers: download it again")
    generation = path / "generation_config.json"
    if generation.exists():
        _read_json(generation)  # not too large
    try:
        return SafetensorsFolder(path).config()
    except ModelError as error:
        # Its folder is known: what matters is what is wrong.
        raise _UnusableError(str(error).replace(f"{path}/", "its ").rstrip(".")) from None
    except Exception as error:  # of whatever kind: what somebody wrote there is not to stop a list
        raise _UnusableError(f"its config.json cannot be used ({type(error).__name__}: {error})") from None


def _checked(found: Summary, path: Path, config: ModelConfig) -> Summary:
    """Complete the summary of a folder whose tensors have to be compared with its weights one by one.

    Several tensors make one quantised matrix, and some tensors are no weights.
    """
    try:
        weights = check_model(SafetensorsFolder(path), config)
        form = stored_form(weights, config)
    except ModelError as error:
        raise _UnusableError(str(error).replace(f"{path}/", "").rstrip(".")) from None
    except Exception as error:  # of whatever kind: what somebody wrote there is not to stop a list
        raise _UnusableError(f"its weights cannot be used ({type(error).__name__}: {error})") from None
    return replace(
        found,
        dtype=weights.stored_as,
        parameters=config.num_parameters,
        is_quantised=weights.is_quantised,
        form=form,
    )


def _are_all(config: ModelConfig, parameters: int, stored: str) -> bool:
    """Return whether a folder holds as many numbers as a model has, as floats, and not many more.

    Raises _UnusableError where it holds less.
    """
    if parameters < config.num_parameters:
        raise _UnusableError(
            f"its config.json describes {config.num_parameters:,} parameters, but its files hold "
            f"{parameters:,}: complete the download"
        )
    # A tied head may be stored, too, and old checkpoints have some buffers.
    spare = config.vocab_size * config.hidden_size + config.num_parameters // 50
    return parameters <= config.num_parameters + spare and stored in ("F32", "F16", "BF16")


def _weights(path: Path, names: frozenset[str]) -> tuple[int, str]:
    """Parameters in the safetensors files, and the type that most of their bytes have."""
    elements: Counter[str] = Counter()
    for name in _weight_files(path, names):
        for stored, count in _header(path / name).items():
            elements[stored] += count
    if not elements:
        raise _UnusableError("its weight files are empty: download them again")
    widest = max(elements, key=lambda stored: elements[stored] * _BITS.get(stored, 8))
    return sum(elements.values()), widest


def _weight_files(path: Path, names: frozenset[str]) -> list[str]:
    if "model.safetensors.index.json" in names:
        weight_map = _read_json(path / "model.safetensors.index.json").get("weight_map")
        values = weight_map.values() if isinstance(weight_map, dict) else ()
        files = {file for file in values if isinstance(file, str)}
        if not files or len(files) > MAX_WEIGHT_FILES or not all(isinstance(file, str) for file in values):
            raise _UnusableError("its model.safetensors.index.json names no weight files: download it again")
        missing = sorted(files - names)
        if missing:
            raise _UnusableError(f"{missing[0][:100]} is missing: complete the download")
        return sorted(files)
    if "model.safetensors" in names:
        return ["model.safetensors"]
    if any(name.endswith(_PICKLES) for name in names):
        raise _UnusableError(
            "its weights are pickle files, which can run code when opened: choose the safetensors version"
        )
    raise _UnusableError("it has no weights (model.safetensors): complete the download")


def _header(file: Path) -> Counter[str]:
    """Elements by type, from a safetensors file: its length in 8 bytes, then JSON."""
    damaged = _UnusableError(f"{file.name} is damaged: download it again")
    elements: Counter[str] = Counter()
    try:
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            if length > MAX_HEADER_BYTES:
                raise damaged
            header = json.loads(opened.read(length))
            end = 8 + length
            for name, tensor in header.items():
                if name == "__metadata__":
                    continue
                shape, offsets = tensor["shape"], tensor["data_offsets"]
                if not all(isinstance(each, int) and each >= 0 for each in (*shape, *offsets)):
                    raise damaged
                elements[str(tensor["dtype"])[:20]] += math.prod(shape)
                end = max(end, 8 + length + offsets[1])
            if os.fstat(opened.fileno()).st_size < end:
                raise _UnusableError(f"{file.name} is incomplete: complete the download")
    except OSError as error:
        raise _UnusableError(f"{file.name} cannot be read ({error.strerror})") from None
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError, struct.error):
        raise damaged from None
    return elements
