"""neo-desktop: large language models beyond the memory of a small GPU, at full accuracy."""

import os
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from neo_desktop.engine.engine import Engine
    from neo_desktop.engine.sampling_params import SamplingParams

# Torch's OpenMP reads this when it is loaded. By default its threads spin for a while after each linear
# layer, on the cores that CPU attention needs next: without a GPU that makes attention 1.6 times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

__version__ = version("neo-desktop")
__all__ = ["Engine", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    # Lazy: `import neo_desktop` must not pay for torch.
    if name == "Engine":
        from neo_desktop.engine.engine import Engine

        return Engine
    if name == "SamplingParams":
        from neo_desktop.engine.sampling_params import SamplingParams

        return SamplingParams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
