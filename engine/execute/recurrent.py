"""The states of recurrent layers in an iteration: which tokens pass through which slots."""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from neo_desktop.engine.batch import ScheduledSequence, StateSlots
from neo_desktop.engine.cuda.copies import upload
from neo_desktop.engine.execute.layout import BatchMembers, Rows
from neo_desktop.engine.execute.workspace import InputBuffers, Memory
from neo_desktop.models.config import ModelConfig
from neo_desktop.models.recurrent import RecurrentBatch, Spans

DROPPED = StateSlots(-1, -1)  # empty before, dropped afterwards


def allocate_states(config: ModelConfig, num_slots: int, device: torch.device) -> list[Tensor]:
    """Return memory for the states, per recurrent operator, with one more slot for scratch."""
    return [torch.zeros(num_slots + 1, *shape, device=device) for shape in config.state_shapes]


def recurrent_batch(states: Sequence[Tensor], memory: Memory, members: BatchMembers) -> RecurrentBatch | None:
    """Return the states of a sub-batch's requests; None: the model has no recurrent layers."""
    if not states:
        return None
    passes = [Spans(memory.inputs.spans, 1)] if len(memory.inputs.spans) else []
    device = memory.state.residual.device
    passes += [Spans(upload(spans, torch.int32, device), 1) for spans in _draft_spans(memory, members)]
    begin, rest, row = [], [], memory.rows.first_prompt
    for sequence in members.prompts:
        slots, end = sequence.states or DROPPED, row + len(sequence.token_ids)
        middle = row + slots.checkpoint_tokens
        if middle == row:
            begin.append((row, end, slots.source, slots.target))
        else:
            begin.append((row, middle, slots.source, slots.checkpoint))
            rest.append((middle, end, slots.checkpoint, slots.target))
        row = end
    for spans in filter(None, (begin, rest)):
        table = upload(spans, torch.int32, device)
        passes.append(Spans(table, max(end - first for first, end, *_ in spans)))
    return RecurrentBatch(states, tuple(passes))


def has_new_spans(memory: Memory) -> bool:
    """Return True if a graph would not have all spans: those of prompts and drafts are not in the inputs."""
    batch = memory.state.recurrent
    return batch is not None and any(spans.table is not memory.inputs.spans for spans in batch.passes)


def _draft_spans(memory: Memory, members: BatchMembers) -> list[list[tuple[int, int, int, int]]]:
    """Return the spans of the drafts' first tokens, then those of their second tokens, and so on.

    Each token's state comes from the pass before.
    """
    spans: list[list[tuple[int, int, int, int]]] = []
    for start, sequences in zip(memory.rows.starts, members.decodes, strict=False):
        depth = 0
        for row, sequence in enumerate(sequences, start):
            depth = depth + 1 if sequence.is_draft else 0
            if sequence.is_draft:
                if depth > len(spans):
                    spans.append([])
                slots = sequence.states or DROPPED
                spans[depth - 1].append((row, row + 1, slots.source, slots.target))
    return spans


def fill_spans(staged: InputBuffers[NDArray[np.int32]], rows: Rows, members: BatchMembers) -> None:
    """Fill in the spans of decodes and of async decodes at each stage; rows of padding drop their states.

    So do rows of drafts, which later passes compute again: their states come from rows before.
    """
    first, others = members.async_decodes[:1], members.async_decodes[1:]
    _fill(staged.spans, 0, zip(rows.starts, (*members.decodes, *first), strict=False))
    start = rows.starts[-1]
    for spans, group in zip(staged.async_spans, others, strict=False):
        _fill(spans, start, [(start, group)])


def _fill(
    spans: NDArray[np.int32],
    first: int,
    groups: Iterable[tuple[int, Sequence[ScheduledSequence | None]]],
) -> None:
    """Fill in the spans [rows, 4] of the rows from `first` on; a group is the first row and its sequences."""
    spans[:, 0] = np.arange(first, first + len(spans))
    spans[:, 1] = spans[:, 0] + 1
    spans[:, 2:] = DROPPED[:2]
    for start, sequences in groups:
        for row, sequence in enumerate(sequences, start - first):
            if sequence is not None and sequence.states is not None and not sequence.is_draft:
                spans[row, 2:] = sequence.states[:2]
