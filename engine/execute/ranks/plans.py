"""Plans for the other ranks. Only rank 0 chooses tokens, so sampling settings stay there."""

from neo_desktop.engine.batch import IterationPlan, SamplingInput, ScheduledSequence, SubBatch
from neo_desktop.engine.int_array import IntArray
from neo_desktop.engine.sampling_params import SamplingParams

_SOMEHOW = SamplingInput(SamplingParams(), 0, 0, 0, IntArray().view(), IntArray().view())


def for_other_ranks(plan: IterationPlan) -> IterationPlan:
    """Return a plan with the same rows, in which settings of sampling are placeholders."""
    return IterationPlan(
        tuple(SubBatch(tuple(map(_sequence, batch.sequences))) for batch in plan.sub_batches),
        plan.copies,
        plan.predicted,
        async_decodes=tuple(
            tuple(each and _sequence(each) for each in group) for group in plan.async_decodes
        ),
    )


def _sequence(sequence: ScheduledSequence) -> ScheduledSequence:
    return ScheduledSequence(
        sequence.request_id,
        sequence.token_ids,
        sequence.start,
        sequence.tier,
        sequence.block_table,
        None if sequence.sampling is None else _SOMEHOW,
        num_pooled=sequence.num_pooled,
    )
