"""The choice of a backend: the engine, or llama.cpp."""

import importlib.util
from dataclasses import fields
from pathlib import Path

from neo_desktop.engine.options import OPTIONS, EngineOptions
from neo_desktop.models.gguf.checkpoint import gguf_files, split_files
from neo_desktop.models.json_file import INSTALL_LLAMACPP

LLAMACPP_NOTE = (
    "llama.cpp computes this model, not neo-desktop's own engine: there is no offloading by NEO, requests "
    "are answered one after the other, and the scheduler has no figures."
)
# The options of llama.cpp.
_USED = ("model", "device", "cpu_cache_tokens", "max_batch_tokens")


def is_installed() -> bool:
    """True if llama-cpp-python is installed; this does not import it."""
    return importlib.util.find_spec("llama_cpp") is not None


def gguf_file(path: Path) -> Path | None:
    """Return a model's GGUF file, of a split one the first part; None: it has other files."""
    if path.is_file():
        return split_files(path)[0]
    files = [] if any(path.glob("*.safetensors")) else gguf_files(path)
    return files[0] if len(files) == 1 else None


def check_llamacpp(path: Path, options: EngineOptions) -> Path:
    """Return the file for llama.cpp to load; ValueError: it cannot, or an option means nothing to it."""
    file = gguf_file(path)
    if file is None or options.shape is not None:
        raise ValueError(
            "the backend llamacpp computes models in GGUF files, and this is none: name one with --model, or "
            "leave --backend out"
        )
    if not is_installed():
        raise ValueError(f"the backend llamacpp needs llama-cpp-python: {INSTALL_LLAMACPP}")
    changed = [
        OPTIONS[field.name].flag or field.name
        for field in fields(options)
        if field.name not in _USED and getattr(options, field.name) != field.default
    ]
    if changed:
        raise ValueError(
            f"llama.cpp, which computes this model, has no {', '.join(changed)}: leave it out, or choose a "
            "model that the engine has"
        )
    return file
