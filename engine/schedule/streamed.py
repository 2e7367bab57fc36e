"""Streamed KV: as many decodes as the bus can serve while the device computes.

Each further streamed decode lengthens the iteration, which slows every request down. (Pie, section 3.4, finds
its "expansion" by trial. This module predicts it anew for every iteration, and measured bus times correct
the prediction.)
"""

from bisect import bisect_right

from neo_desktop.engine.kv_tier import KVTier
from neo_desktop.engine.predict.cost_model import TableCostModel
from neo_desktop.engine.predict.estimate import BatchShape, Decodes, copies_ms, device_attention_ms
from neo_desktop.engine.schedule.batch_builder import BatchBuilder, HostQueue


def hides(cost: TableCostModel, shape: BatchShape, moved_tokens: int = 0) -> bool:
    """True if the bus transfers all streamed KV of a layer within the layer's compute time.

    Always true if transfers and computation do not overlap: the choice of decodes then makes no difference.

    Args:
        moved_tokens: see `IterationShape`.
    """
    if not cost.overlaps:
        return True
    return copies_ms(cost, (shape,), moved_tokens) <= cost.linear_ms(shape.tokens) + device_attention_ms(
        cost, shape
    )


def num_hidden(builder: BatchBuilder, queue: HostQueue, num_starved: int) -> int:
    """Return how many streamed decodes from the front have a transfer that hides behind the iteration.

    Args:
        num_starved: decodes at the front that join in any case. At least one joins an empty batch.
    """
    # Decodes attended by the CPU take part in the linear stages.
    shape = builder.shape._replace(tokens=builder.shape.tokens + len(builder.queue))

    def is_late(count: int) -> bool:
        decodes = queue.decodes(range(count))
        return not hides(builder.cost, shape.plus(decodes), builder.moved_tokens)

    num_first = bisect_right(range(1, len(queue) + 1), 0, key=is_late)
    return max(num_first, num_starved, int(not shape.tokens))


def admits(builder: BatchBuilder, tier: KVTier, num_tokens: int) -> bool:
    """True if the transfer of one more request still hides once all running requests are decodes."""
    there = {each: decodes for each, decodes in builder.typical_decodes().items() if not each.host_attends}
    shape = BatchShape(tokens=builder.num_on_host).plus(there).plus({tier: Decodes(1, num_tokens)})
    return hides(builder.cost, shape)
