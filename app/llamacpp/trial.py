"""The doctor's check of llama.cpp: a small quantised model is loaded and computed in a process of its own."""

import importlib.util
import tempfile
import time
from pathlib import Path

import torch

from neo_desktop.app.llamacpp.choice import is_installed
from neo_desktop.app.llamacpp.gguf_writer import write_gguf
from neo_desktop.app.llamacpp.recipe import LlamaCppRecipe, load_llamacpp
from neo_desktop.engine.doctor.outcome import Outcome, Result
from neo_desktop.engine.options import EngineOptions
from neo_desktop.models.registry import random_model
from neo_desktop.models.shapes import shape

TITLE = "llama.cpp computes a small quantised model"
TYPES = ("Q4_1", "Q8_0")  # of matrices, each with kernels of its own


def try_llamacpp() -> Outcome | None:
    """Load and compute a model for each type; None: llama-cpp-python is not installed."""
    if not is_installed() or importlib.util.find_spec("gguf") is None:
        return None
    begun_s = time.perf_counter()
    result, reason = Result.OK, None
    options = EngineOptions(device="cpu", cpu_cache_tokens=512)
    with tempfile.TemporaryDirectory() as folder:
        for kind in TYPES:
            path = Path(folder) / f"{kind}.gguf"
            try:
                model = random_model(shape("tiny"), dtype=torch.float32, device=torch.device("cpu"))
                write_gguf(importlib.import_module("gguf"), model, path, kind)
                load_llamacpp(LlamaCppRecipe(kind, path, options), lambda share, what: None).close()
            except (RuntimeError, ValueError, OSError, MemoryError) as error:
                result, reason = Result.FAILED, f"{kind}: {error}"
                break
    figures = {"ms": 1e3 * (time.perf_counter() - begun_s)}
    return Outcome("llamacpp", TITLE, None, None, result, reason, figures)
