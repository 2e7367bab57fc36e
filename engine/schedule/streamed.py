"""Decodes whose KV comes from host memory to the device: as many as hide behind what the device does anyway.

Beyond that an iteration takes as much longer as more of them join: the others are better off without them.
(Pie, section 3.4, finds its "expansion" by trial. Here it is predicted anew for every iteration, and what the
bus truly takes corrects the prediction.)
"""

from bisect import bisect_right
from collections.abc import Sequence

from neo_desktop.engine.kv_tier import KVTier
from neo_desktop.engine.predict.cost_model import CostModel
from neo_desktop.engine.predict.estimate import BatchShape, Decodes, copies_ms, device_attention_ms
from neo_desktop.engine.schedule.batch_builder import BatchBuilder, HostQueue


def hides(cost: CostModel, shape: BatchShape, moved_tokens: int = 0) -> bool:
    """Whether the bus brings all of an iteration's KV in the time that its layers take anyway.

    Where nothing overlaps, nothing hides, and it makes no difference who joins.

    Args:
        moved_tokens: see `iteration_ms`.
    """
    if not cost.overlaps:
        return True
    return copies_ms(cost, (shape,), moved_tokens) <= cost.linear_ms(shape.tokens) + device_attention_ms(
        cost, shape
    )


def hidden(builder: BatchBuilder, decodes: Sequence[tuple[KVTier, int]], num_starved: int) -> list[int]:
    """Return the positions of those swapped decodes that hide behind an iteration.

    Args:
        decodes: (where its KV lies, its context tokens) of each, in the order in which they join.
        num_starved: how many at the front join in any case; one does where there is nothing else to do.
    """
    cost, moved_tokens, beside = builder.cost, builder.moved_tokens, len(builder.queue)
    # Whoever the CPU attends for takes part in the linear stages.
    shape = builder.shape._replace(tokens=builder.shape.tokens + beside)
    queue = HostQueue(decodes)

    def is_late(count: int) -> bool:
        return not hides(cost, shape.plus(queue.decodes(range(count))), moved_tokens)

    num_first = bisect_right(range(1, len(queue) + 1), 0, key=is_late)
    num_first = max(num_first, num_starved, int(not shape.tokens))
    return list(range(num_first))


def admits(builder: BatchBuilder, tier: KVTier, num_tokens: int) -> bool:
    """Whether one more request of so many tokens hides, once all who are there are decodes."""
    there = {each: decodes for each, decodes in builder.residents.items() if not each.host_attends}
    shape = BatchShape(tokens=builder.num_on_host).plus(there).plus({tier: Decodes(1, num_tokens)})
    return hides(builder.cost, shape)
