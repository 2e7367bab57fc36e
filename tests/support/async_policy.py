"""A policy whose CPU and worker decodes are asynchronous whenever the device has other work."""

from dataclasses import replace

from neo_desktop.engine.predict.estimate import joined
from neo_desktop.engine.schedule.batch_builder import BatchBuilder
from neo_desktop.engine.schedule.partition import CandidateGenerator, Partition
from neo_desktop.engine.schedule.policies import Policy


class AllAsync(Policy):
    """Needs no prediction; each third number of waiting requests advances no async decode."""

    def partition(self, builder: BatchBuilder) -> Partition:
        generator = CandidateGenerator(builder)
        waiting = builder.queue.decodes(range(len(builder.queue)))
        decodes = joined(builder.async_decodes, waiting)
        if not builder.shape.tokens or not decodes:
            return generator.together()
        if builder.num_waiting % 3 == 2:
            return generator.front(0, len(builder.queue) // 2)
        partition = generator.front(0, 0)
        return replace(partition, shape=partition.shape._replace(async_decodes=decodes))
