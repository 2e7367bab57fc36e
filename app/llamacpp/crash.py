"""llama.cpp that crashes: its build does not suit this processor, or this model."""

import logging

from neo_desktop.app.engines.messages import EngineCrashError, EngineMaker
from neo_desktop.app.engines.process import EngineProcess
from neo_desktop.engine.progress import Progress

logger = logging.getLogger(__name__)

# A native build has what the compiler finds on the processor: AMX of a Xeon for one, which has crashed.
REBUILD = (
    "install it again without code for this very processor: CMAKE_ARGS=-DGGML_NATIVE=OFF pip install "
    "--force-reinstall --no-cache-dir --no-binary llama-cpp-python llama-cpp-python"
)


class LlamaCppCrashError(RuntimeError):
    """llama.cpp crashed twice at the same stage."""


def load_llamacpp(make: EngineMaker, progress: Progress) -> EngineProcess:
    """Load a model with llama.cpp in a process; one that crashes is tried once more.

    Raises:
        LlamaCppCrashError: it crashes again.
        and what `EngineProcess.load` raises.
    """
    try:
        return EngineProcess.load(make, progress)
    except EngineCrashError as first:
        logger.warning("llama.cpp crashed (%s) while it said: %s; once more", first.signal, first.stage)
    try:
        return EngineProcess.load(make, progress)
    except EngineCrashError as second:
        raise LlamaCppCrashError(f"{crashed(second.signal, second.stage)}. {what_to_do()}") from None


def crashed(signal: str, stage: str) -> str:
    """Say what happened."""
    where = f" at the stage '{stage}'" if stage else ""
    return f"llama.cpp crashed twice ({signal}){where}: its build fails on this processor"


def what_to_do() -> str:
    """Say what to do, as a sentence without a full stop."""
    return f"{REBUILD[0].upper()}{REBUILD[1:]}; or leave --backend out for a model that the engine has"
