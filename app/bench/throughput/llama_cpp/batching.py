"""Continuous batching as llama.cpp's server does it: decodes first, then prompts in the order they came."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from neo_desktop.app.bench.throughput.answers import Answer
from neo_desktop.app.bench.throughput.llama_cpp.library import Piece
from neo_desktop.engine.batch import SampledToken, TokenLogprob


class Steps(Protocol):
    """What computes: `library.Context`."""

    batch_tokens: int  # that a step takes at most
    num_sequences: int  # that are under way at the same time at most

    def step(self, pieces: Sequence[Piece]) -> NDArray[np.float32]:
        """Compute tokens; return logits `[pieces that want them, vocab]`."""

    def forget(self, sequence: int) -> None:
        """Free the KV of a sequence."""


@dataclass(slots=True)
class _Request:
    """A request under way."""

    index: int
    tokens: list[int]  # prompt and output
    num_left: int  # tokens to be chosen yet
    num_computed: int = 0


def serve(
    steps: Steps,
    prompts: Sequence[Sequence[int]],
    num_outputs: Sequence[int],
    progress: Callable[[float], None],
    num_logprobs: int = 0,
) -> tuple[tuple[Answer, ...], float]:
    """Answer all prompts greedily.

    Args:
        num_outputs: tokens of each answer.
        progress: gets the share of the tokens that are there.
        num_logprobs: of each position, with its log-probabilities; 0: none.

    Returns:
        The answers, and the seconds that all of them took.
    """
    waiting = deque(
        _Request(index, list(prompt), count)
        for index, (prompt, count) in enumerate(zip(prompts, num_outputs, strict=True))
    )
    free = list(reversed(range(steps.num_sequences)))
    running: dict[int, _Request] = {}  # by sequence; the oldest first, so only the last can be in its prompt
    answers: list[list[SampledToken]] = [[] for _ in prompts]
    done, expected = 0, sum(num_outputs)
    started = time.perf_counter()
    while waiting or running:
        pieces = []
        room = steps.batch_tokens
        for sequence, request in running.items():
            pieces.append(_piece(sequence, request, room))
            room -= len(pieces[-1].tokens)
        while waiting and free and room:
            sequence = free.pop()
            running[sequence] = waiting.popleft()
            pieces.append(_piece(sequence, running[sequence], room))
            room -= len(pieces[-1].tokens)
        chosen = iter(_choose(steps.step(pieces), num_logprobs))
        for piece in pieces:
            request = running[piece.sequence]
            request.num_computed += len(piece.tokens)
            if not piece.wants_logits:
                continue
            token = next(chosen)
            answers[request.index].append(token)
            request.tokens.append(token.token_id)
            request.num_left -= 1
            done += 1
            if request.num_left == 0:
                steps.forget(piece.sequence)
                del running[piece.sequence]
                free.append(piece.sequence)
        progress(done / expected)
    seconds = time.perf_counter() - started
    return tuple(map(tuple, answers)), seconds


def _piece(sequence: int, request: _Request, room: int) -> Piece:
    start = request.num_computed
    tokens = request.tokens[start : start + room]
    return Piece(sequence, start, tokens, start + len(tokens) == len(request.tokens))


def _choose(logits: NDArray[np.float32], num_logprobs: int) -> list[SampledToken]:
    """The likeliest token of each row."""
    if len(logits) == 0:
        return []
    if num_logprobs == 0:
        return [SampledToken(token) for token in logits.argmax(axis=1).tolist()]
    logprobs = torch.log_softmax(torch.from_numpy(logits), dim=-1).topk(min(num_logprobs, logits.shape[1]))
    return [
        SampledToken(ids[0], (ranked := tuple(map(TokenLogprob, ids, values)))[0], ranked)
        for ids, values in zip(logprobs.indices.tolist(), logprobs.values.tolist(), strict=True)
    ]
