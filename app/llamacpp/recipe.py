"""Loads a model with llama.cpp, whose build may crash: on this processor, or with this model."""

import logging
import sys
from dataclasses import dataclass
from pathlib import Path

from neo_desktop import native
from neo_desktop.app.engines.messages import EngineCrashError, EngineMaker
from neo_desktop.app.engines.process import EngineProcess
from neo_desktop.app.llamacpp.engine import LlamaCppEngine
from neo_desktop.app.llamacpp.library import LlamaContext, LlamaModel, supports_gpu
from neo_desktop.engine.options import MAX_BATCH_TOKENS, EngineOptions
from neo_desktop.engine.profiling.hardware import host_memory
from neo_desktop.engine.progress import Progress
from neo_desktop.models.json_file import ModelError

logger = logging.getLogger(__name__)

CONTEXT_TOKENS = 16_384  # unless asked for otherwise: llama.cpp takes all memory for it at once
LEAST_CONTEXT_TOKENS = 512
_KV_SHARE = 0.5  # of the host memory that is left beside the weights
TRYING = "Trying llama.cpp on this processor"
TRIED_TOKENS = 33  # at once: more than one tile of any kernel for several rows
# A native build has what the compiler finds on the processor: AMX of a Xeon for one, which has crashed.
REBUILD = (
    "Install it again without code for this very processor: CMAKE_ARGS=-DGGML_NATIVE=OFF "
    f"{sys.executable} -m pip install "
    "--force-reinstall --no-cache-dir --no-binary llama-cpp-python llama-cpp-python"
)


def try_out(model: LlamaModel, context: LlamaContext, batch_tokens: int) -> None:
    """Compute a token and some at once: code that crashes on this processor does so while loading."""
    token = model.role_token("bos") or 0
    for count in (1, min(TRIED_TOKENS, batch_tokens)):
        context.evaluate([token] * count)
        context.truncate(0)


@dataclass(frozen=True, slots=True)
class LlamaCppRecipe:
    name: str  # as the API calls the model
    file: Path
    options: EngineOptions  # which `check_llamacpp` does not complain of

    def __call__(self, progress: Progress) -> LlamaCppEngine:
        """Load the model.

        Raises ModelError: llama.cpp cannot use it; ValueError: it has no GPU; MemoryError: no room.
        """
        gpu = self.options.device != "cpu" and supports_gpu()
        if self.options.device == "cuda" and not gpu:
            raise ValueError(
                "device 'cuda' was asked for, but llama-cpp-python was built without CUDA: build it with "
                "CMAKE_ARGS=-DGGML_CUDA=on, or use device 'cpu'"
            )
        model = LlamaModel(self.file, gpu=gpu, progress=progress)
        if (reason := model.why_unusable) is not None:
            raise ModelError(f"{self.file} writes no answers: {reason}. Choose another model.")
        tokens = self._context_tokens(model)
        batch = min(self.options.max_batch_tokens or MAX_BATCH_TOKENS["cpu"], tokens)
        context = LlamaContext(model, tokens, batch, native.num_usable_cpus())
        progress(1.0, TRYING)
        try_out(model, context, batch)
        engine = LlamaCppEngine(model, context, tokens, batch, gpu=gpu)
        engine.model_name = self.name
        place = "GPU" if gpu else "CPU"
        logger.info("%s: llama.cpp, %s, context of %d tokens, %s", self.name, model.stored_as, tokens, place)
        return engine

    def _context_tokens(self, model: LlamaModel) -> int:
        trained = model.trained_tokens
        if self.options.cpu_cache_tokens:
            return min(trained, self.options.cpu_cache_tokens)
        fitting = int(_KV_SHARE * host_memory().available_bytes / max(model.kv_bytes_per_token, 1))
        return min(trained, CONTEXT_TOKENS, max(fitting, LEAST_CONTEXT_TOKENS))


def load_llamacpp(make: EngineMaker, progress: Progress) -> EngineProcess:
    """Load a model with llama.cpp in a process, see `EngineProcess.load`. RuntimeError: it crashes."""
    try:
        return EngineProcess.load(make, progress)
    except EngineCrashError as crash:
        raise RuntimeError(
            f"llama.cpp crashed ({crash.signal}) at the stage '{crash.stage}': its build fails on this "
            f"processor. {REBUILD}; or leave --backend out for a model that the engine has"
        ) from None
