"""Synthetic iterations for measurements: a few layers of a model, and plans whose outputs are discarded."""

import copy
from collections.abc import Iterable, Sequence
from dataclasses import replace

from neo_desktop.engine.batch import BlockCopy, IterationPlan, SamplingInput, ScheduledSequence, SubBatch
from neo_desktop.engine.int_array import IntArray, IntView
from neo_desktop.engine.kv_tier import KVTier
from neo_desktop.engine.sampling_params import SamplingParams
from neo_desktop.models.decoder import Decoder

GREEDY = SamplingParams(temperature=0.0)
ALL_SAMPLERS = SamplingParams(temperature=1.0, top_p=0.9, top_k=50, logprobs=1)  # the sampler's longest path


def with_layers(decoder: Decoder, indices: Sequence[int]) -> Decoder:
    """Return a model of some of the layers, which shares the weights."""
    if list(indices) == list(range(decoder.config.num_layers)):
        return decoder
    part = copy.copy(decoder)
    part.layers = [decoder.layers[index] for index in indices]
    windows = tuple(decoder.config.layer_windows[index] for index in indices)
    part.config = replace(decoder.config, num_layers=len(indices), layer_windows=windows)
    return part


def sequence(
    index: int, tier: KVTier, start: int, tokens: int, table: IntView, params: SamplingParams | None
) -> ScheduledSequence:
    """Return `tokens` tokens of a request after `start` computed ones; without `params` none is chosen."""
    no_tokens = IntArray().view()
    sampling = None if params is None else SamplingInput(params, 0, 0, start + tokens, no_tokens, no_tokens)
    return ScheduledSequence(str(index), (0,) * tokens, start, tier, table, sampling)


def plan_of(sequences: Iterable[ScheduledSequence], copies: Sequence[BlockCopy] = ()) -> IterationPlan:
    """Return an iteration of one sub-batch."""
    return IterationPlan((SubBatch(tuple(sequences)),), tuple(copies))
