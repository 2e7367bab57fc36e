"""A summary of a model's folder or file, from its headers alone; damaged files get a reason."""

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from neo_desktop.app.llamacpp.choice import is_installed
from neo_desktop.engine.loading import BUILTIN_NAME
from neo_desktop.engine.mtp import Layer
from neo_desktop.engine.options import BUILTIN
from neo_desktop.models.checkpoint import Checkpoint
from neo_desktop.models.config import ModelConfig
from neo_desktop.models.gguf.checkpoint import GGUFCheckpoint, gguf_files, split_files
from neo_desktop.models.gguf.container import GGUFFile
from neo_desktop.models.gguf.towers import is_tower
from neo_desktop.models.json_file import JsonFile, ModelError, UnsupportedModelError
from neo_desktop.models.missing import WEIGHTS_ENDS, is_model_folder, why_no_model
from neo_desktop.models.registry import check_model
from neo_desktop.models.safetensors.folder import SafetensorsFolder
from neo_desktop.models.stored_form import StoredForm, stored_form
from neo_desktop.models.traced.config import TracedConfig

MAX_LAYERS = 1024  # more than any model has: a list of them is made per model
_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8", "F8_E5M2": "float8"}
_OTHER_WEIGHTS = tuple(end for end in WEIGHTS_ENDS if end != ".gguf")
_State = tuple[tuple[str, int, int], ...]  # names, sizes and times of files


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model that can be named; None stands for unknown facts."""

    path: Path
    size_bytes: int  # of its files
    dtype: str | None = None  # "bfloat16", "gptq, 4 bits"; None: unknown
    architecture: str | None = None
    parameters: int | None = None  # None: unknown
    context_tokens: int | None = None
    config: ModelConfig | None = None  # None: this program cannot run it
    reason: str | None = None  # why it cannot be run; None: it can
    is_quantised: bool = False  # its weights have less than 16 bits
    form: StoredForm = StoredForm()  # noqa: RUF009 - frozen; in which a CPU keeps them
    layer: Layer | None = None  # of multi-token prediction; None: it has none that can draft
    needs_llamacpp: bool = False  # the engine cannot run it, llama.cpp may
    name: str = ""
    shape: str | None = None  # random weights in this published shape, which are in no file

    @property
    def source(self) -> str:
        """Its name for the engine."""
        return BUILTIN if self.name == BUILTIN_NAME else str(self.path)

    @property
    def is_by_transformers(self) -> bool:
        """True if its stages are cut out of the code of transformers: there is no decoder of our own."""
        return isinstance(self.config, TracedConfig)


def summarize(path: Path) -> LocalModel:
    """Look at one folder, or at a GGUF file; never raises for what it holds."""
    files = _files(path)
    empty = LocalModel(path, sum(size_bytes for _, size_bytes, _ in files))
    if path.is_file():
        return _of_gguf(empty, path)
    has_others = any(name.endswith(_OTHER_WEIGHTS) for name, _, _ in files)
    models = [] if has_others else gguf_files(path)
    if len(models) == 1:
        return _of_gguf(empty, models[0])
    if models:
        return replace(empty, reason=f"it has {len(models)} GGUF models: name the file that is meant")
    if not is_model_folder(path):
        return replace(empty, reason=why_no_model(path))
    return _of_folder(empty, path, files)


def _files(path: Path) -> _State:
    """The files of a folder, or a file with its parts."""
    try:
        found = split_files(path) if path.is_file() else [Path(entry.path) for entry in os.scandir(path)]
    except OSError:
        return ()
    state = []
    for file in found:
        with suppress(OSError):  # a link to nowhere, or to itself
            if file.is_file():  # also through a link: the hub's cache consists of links
                status = file.stat()
                state.append((file.name, status.st_size, status.st_mtime_ns))
    return tuple(sorted(state))


def _of_folder(empty: LocalModel, path: Path, files: _State) -> LocalModel:
    raw = JsonFile(path / "config.json", {})
    with suppress(ModelError):  # is raised again below
        raw = JsonFile.read(path / "config.json")
    described = replace(
        empty,
        architecture=_architecture(raw),
        context_tokens=_positive(raw.raw("max_position_embeddings")),
        dtype=_config_dtype(raw),
    )
    try:
        layers = raw.raw("num_hidden_layers")
        if isinstance(layers, int) and layers > MAX_LAYERS:
            raise ModelError(f"its config.json asks for {layers} layers: download it again")
        found = _facts(SafetensorsFolder, path, files)
        if not (path / "tokenizer.json").is_file():
            raise ModelError("it has no tokenizer.json: complete the download")
    except Exception as error:  # of any kind: a damaged file must not stop a list
        return replace(described, reason=_reason(error, path))
    return replace(found, size_bytes=empty.size_bytes)


def _of_gguf(empty: LocalModel, file: Path) -> LocalModel:
    try:
        towers = (each for each in _files(file.parent) if is_tower(each[0]))
        found = _facts(GGUFCheckpoint, file, (*_files(file), *towers))
    except UnsupportedModelError as error:
        architecture, context_tokens = _described(file)
        return replace(
            empty,
            dtype="GGUF",
            architecture=architecture,
            context_tokens=context_tokens,
            reason=None if is_installed() else _reason(error, file.parent),
            needs_llamacpp=True,
        )
    except Exception as error:  # as above
        return replace(empty, dtype="GGUF", reason=_reason(error, file.parent))
    return replace(found, path=empty.path, size_bytes=empty.size_bytes)


@lru_cache(maxsize=512)
def _facts(open_it: Callable[[Path], Checkpoint], path: Path, _: _State) -> LocalModel:
    """Read the headers, once until a file changes."""
    checkpoint = open_it(path)
    config = checkpoint.config()
    weights = check_model(checkpoint, config)
    if isinstance(checkpoint, GGUFCheckpoint):
        checkpoint.check_tokenizer()
    return LocalModel(
        path=path,
        size_bytes=0,
        dtype=_NAMES.get(weights.stored_as, weights.stored_as),
        architecture=config.architecture,
        parameters=config.num_parameters,
        context_tokens=config.max_context_tokens,
        config=config,
        is_quantised=weights.is_quantised,
        form=stored_form(weights, config),
        layer=Layer.of(checkpoint, config, weights),
    )


def _reason(error: Exception, path: Path) -> str:
    """The sentence of an error; the folder is known, so it is left out."""
    if isinstance(error, ModelError):
        return str(error).replace(f"{path}/", "").replace(f"{path} ", "it ").rstrip(".")
    return f"it cannot be used ({type(error).__name__}: {error})"


def _described(path: Path) -> tuple[str | None, int | None]:
    """Architecture and context of a GGUF file that the engine cannot run, as far as they can be read."""
    try:
        metadata = GGUFFile(split_files(path)[0]).metadata
    except ModelError:  # with tensors of unknown types, say
        return None, None
    name = metadata.get("general.architecture")
    if not isinstance(name, str):
        return None, None
    return name[:100], _positive(metadata.get(f"{name}.context_length"))


def _architecture(raw: JsonFile) -> str | None:
    named = raw.raw("architectures")
    name = named[0] if isinstance(named, list) and named else raw.raw("model_type")
    return name[:100] if isinstance(name, str) else None


def _config_dtype(raw: JsonFile) -> str | None:
    """The method that quantised the weights, as config.json names it."""
    quantization = raw.raw("quantization_config")
    if not isinstance(quantization, dict):
        return None
    method, bits = quantization.get("quant_method"), _positive(quantization.get("bits"))
    return f"{method if isinstance(method, str) else 'quantized'}"[:40] + (f", {bits} bits" if bits else "")


def _positive(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**40 else None
