"""Chooses what carries out plans."""

from neo_desktop.engine.cuda.streams import Streams
from neo_desktop.engine.execute.executor import Executor
from neo_desktop.engine.execute.graphs.cuda import graph_executor
from neo_desktop.engine.execute.pipeline import PipelineExecutor
from neo_desktop.engine.execute.timeline import Timeline
from neo_desktop.engine.kv.storage import KVStorage
from neo_desktop.engine.ladder import ladder
from neo_desktop.models.decoder import Decoder


def build_executor(
    model: Decoder,
    storage: KVStorage,
    max_requests: int,
    timeline: Timeline | None,
    streams: Streams,
) -> Executor:
    """Return what is fastest on the model's device.

    Args:
        max_requests: in an iteration.
        streams: what the work on the model's device runs on.
    """
    pipeline = PipelineExecutor(model, storage, timeline, streams=streams)
    if model.device.type != "cuda" or ladder.rung("graphs") == "eager":
        return pipeline
    return graph_executor(model, storage, max_requests, pipeline, timeline, streams)
