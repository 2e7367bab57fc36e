"""The body of `neo-desktop doctor --measure`: finds or measures the tables of a model."""

from typing import Any

from neo_desktop.engine.options import EngineOptions
from neo_desktop.engine.profiling.profile_cache import load_or_profile, profile_key, profile_path
from neo_desktop.engine.progress import Progress, part
from neo_desktop.engine.setup import MEASURING, set_up


def run_measure(
    options: EngineOptions, progress: Progress, *, refresh: bool = False
) -> tuple[str, dict[str, Any]]:
    """Load the model, then find or measure its tables; raises what `Engine.from_pretrained` raises.

    Returns lines that say where the tables are, and the tables with their key.
    """
    parts = set_up(options, progress)
    decoder, streams = parts.model.decoder, parts.model.streams
    measuring = part(progress, 0.0, 1.0, MEASURING)
    tables = load_or_profile(
        decoder, parts.storage, parts.limits, measuring, streams=streams, refresh=refresh
    )
    key = profile_key(decoder, parts.storage, parts.limits, streams)
    path = profile_path(key)
    where = key["gpu"]["name"] if key["gpu"] else key["cpu"]
    lines = [f"{parts.model.name} on {where}, {key['dtype']}: the tables are in {path}.", streams.note]
    return "\n".join(filter(None, lines)), {"key": key, "path": str(path), "tables": tables.to_json()}
