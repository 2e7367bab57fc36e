"""Plans for the other ranks. Only rank 0 chooses tokens, so sampling settings stay there."""

from dataclasses import replace

from neo_desktop.engine.batch import IterationPlan, SamplingInput, ScheduledSequence, SubBatch
from neo_desktop.engine.int_array import IntArray
from neo_desktop.engine.sampling_params import SamplingParams

_SOMEHOW = SamplingInput(SamplingParams(), 0, 0, 0, IntArray().view(), IntArray().view())


def for_other_ranks(plan: IterationPlan) -> IterationPlan:
    """Return a plan with the same rows, in which settings of sampling are placeholders."""
    return replace(
        plan,
        sub_batches=tuple(SubBatch(tuple(map(_sequence, batch.sequences))) for batch in plan.sub_batches),
        async_decodes=tuple(
            tuple(each and _sequence(each) for each in group) for group in plan.async_decodes
        ),
    )


def _sequence(sequence: ScheduledSequence) -> ScheduledSequence:
    return sequence if sequence.sampling is None else sequence._replace(sampling=_SOMEHOW)
