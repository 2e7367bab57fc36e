"""Puts the executor of graphs together for a GPU."""

from neo_desktop.engine.cuda.copies import host_memory
from neo_desktop.engine.cuda.errors import StreamMemoryError
from neo_desktop.engine.cuda.streams import Streams
from neo_desktop.engine.cuda.workspaces import clear_workspaces
from neo_desktop.engine.execute.executor import Executor
from neo_desktop.engine.execute.graphs.bucket import Most
from neo_desktop.engine.execute.graphs.executor import GraphExecutor
from neo_desktop.engine.execute.graphs.streams import CudaRunner, Lane, check_flags
from neo_desktop.engine.execute.pipeline import PipelineExecutor
from neo_desktop.engine.execute.timeline import Timeline
from neo_desktop.engine.kv.storage import KVStorage
from neo_desktop.engine.ladder import ladder
from neo_desktop.engine.placement import Place
from neo_desktop.models.decoder import Decoder
from neo_desktop.native.relay import empty_flags


def graph_executor(
    model: Decoder,
    storage: KVStorage,
    max_requests: int,
    pipeline: PipelineExecutor,
    timeline: Timeline | None,
    streams: Streams,
) -> Executor:
    """Make an executor whose graphs run on streams of their own; its kernels are compiled now.

    Without memory that is pinned there can be no graphs: then it is the pipeline.

    Args:
        max_requests: in an iteration.
        pipeline: for all other plans.
        streams: where the graphs' own come from.
    """
    assert streams.sms is not None  # it is a GPU
    runner = CudaRunner({lane: streams.stream() for lane in Lane}, timeline)
    if storage.get(Place.HOST) is not None and ladder.rung("graphs") == "host-flags":
        flags = host_memory(lambda pin: empty_flags(1, pinned=pin), model.device)
        try:
            if flags.is_pinned():
                check_flags(runner, flags[0, 0, :1])
        except StreamMemoryError as error:
            ladder.limit("graphs", "device-only", str(error))
    executor = GraphExecutor(
        model,
        storage,
        Most.of(max_requests, model.config.max_context_tokens, storage.block_size),
        num_sms=streams.sms,
        runner=runner,
        pipeline=pipeline,
        timeline=timeline,
        streams=streams,
    )
    if not executor.fits_graphs:
        ladder.limit("graphs", "eager", "what a graph copies in host memory must be pinned, and is not")
        return pipeline
    executor.warm_up()
    # Whoever runs iterations is often another thread, with working memory of its own for cuBLAS: graphs of
    # this thread would keep this one's for ever. So they are captured anew.
    runner.forget()
    clear_workspaces(model.device)
    return executor
