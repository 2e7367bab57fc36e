"""Sampling: logits to tokens."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from neo_desktop.engine.batch import SampledToken, SamplingInput, TokenLogprob
from neo_desktop.engine.cuda.copies import download, upload
from neo_desktop.engine.int_array import IntView
from neo_desktop.models.operators import NO_TOKEN

# Sampling copies the logits of a piece of rows `MOST_COPIES` times, in float32, unless all rows are greedy.
PIECE_ELEMENTS = 2**21
MOST_COPIES = 13

# On a CPU, top-k, top-p and min-p search only this many leading tokens. Sorting the whole vocabulary takes
# ten times as long, and is limited to rows that need more.
LEADING_TOKENS = 512

# Requested log-probabilities of the chosen token, and of the most probable ones.
_RowLogprobs = tuple[TokenLogprob, tuple[TokenLogprob, ...]]


class Sampling(NamedTuple):
    """Tokens in the process of being chosen, one per row."""

    token_ids: Tensor  # [rows] int64, on the logits' device; NO_TOKEN marks failures
    wait: Callable[[], list[SampledToken | None]]  # waits for the tokens; None marks failures


def sample(logits: Tensor, inputs: Sequence[SamplingInput]) -> list[SampledToken | None]:
    """Choose one token per row and wait for them; see `start_sampling`."""
    return start_sampling(logits, inputs).wait()


def start_sampling(logits: Tensor, inputs: Sequence[SamplingInput]) -> Sampling:
    """Start to choose one token per row of logits, [rows, vocab]; rows that are not finite get none.

    A row's random number depends only on its seed, choice and position. A request therefore gets the same
    tokens in any batch, under every policy and after every preemption. Order of the steps: penalties, biases,
    grammar, temperature, top-k, top-p, min-p, then inversion of the cumulative distribution.

    All work is queued on the device without waiting. The calling thread computes the tokens allowed by
    grammars meanwhile.
    """
    if all(is_plain(item) for item in inputs):
        pieces = [_sample(logits, inputs)] if inputs else []
    else:
        pieces = [_sample(logits[rows].float(), inputs[rows]) for rows in _pieces(logits)]
    if not pieces:
        return Sampling(torch.empty(0, dtype=torch.int64, device=logits.device), list)
    token_ids = torch.cat([token_ids for token_ids, _ in pieces])
    chosen = download(token_ids)

    def wait() -> list[SampledToken | None]:
        tokens: list[int] = chosen().tolist()
        logprobs = [row_logprobs for _, wait_for_piece in pieces for row_logprobs in wait_for_piece()]
        return [
            None if token_id == NO_TOKEN else SampledToken(token_id, *(row_logprobs or ()))
            for token_id, row_logprobs in zip(tokens, logprobs, strict=True)
        ]

    return Sampling(token_ids, wait)


def _pieces(logits: Tensor) -> Iterator[slice]:
    """Yield ranges of rows to sample together, limited to the memory of `PIECE_ELEMENTS`."""
    rows = max(PIECE_ELEMENTS // logits.shape[-1], 1)
    return (slice(first, first + rows) for first in range(0, len(logits), rows))


def is_plain(item: SamplingInput) -> bool:
    """Return True if only the most probable token is needed; its logits are not copied."""
    params = item.params
    is_changed = params.has_penalties or params.logit_bias or item.allowed_tokens is not None
    return params.is_greedy and not is_changed and params.logprobs is None


def _sample(
    logits: Tensor, inputs: Sequence[SamplingInput]
) -> tuple[Tensor, Callable[[], Sequence[_RowLogprobs | None]]]:
    """Return tokens [rows] int64, with NO_TOKEN for failures, and a callback for log-probabilities."""
    changed = _apply_grammars(_add_biases(_apply_penalties(logits, inputs), inputs), inputs)
    token_ids = _choose(changed, inputs)
    is_finite = logits.amax(dim=-1).isfinite()
    return token_ids.where(is_finite, NO_TOKEN), _start_logprobs(logits, inputs, token_ids)


def _choose(logits: Tensor, inputs: Sequence[SamplingInput]) -> Tensor:
    """Choose one token per row [rows, vocab]; return [rows] int64.

    A random number selects another token if tokens are sorted. Each row therefore takes the same path in
    every batch.
    """
    rows_of: dict[Callable[[Tensor, Sequence[SamplingInput]], Tensor], list[int]] = {}
    for row, item in enumerate(inputs):
        random = _draw_truncated if item.params.is_truncated else _draw
        rows_of.setdefault(_best if item.params.is_greedy else random, []).append(row)
    if len(rows_of) == 1:
        (choose,) = rows_of
        return choose(logits, inputs)
    token_ids = torch.empty(len(inputs), dtype=torch.int64, device=logits.device)
    for choose, rows in rows_of.items():
        index = upload(rows, torch.int64, logits.device)
        token_ids[index] = choose(logits[index], [inputs[row] for row in rows])
    return token_ids


def _apply_penalties(logits: Tensor, inputs: Sequence[SamplingInput]) -> Tensor:
    rows = [row for row, item in enumerate(inputs) if item.params.has_penalties]
    if not rows:
        return logits
    penalised = [inputs[row] for row in rows]
    index = upload(rows, torch.int64, logits.device)
    in_prompt = _counts([item.prompt_token_ids for item in penalised], logits)
    in_output = _counts([item.output_token_ids for item in penalised], logits)
    repetition, frequency, presence = _columns(
        [
            (item.params.repetition_penalty, item.params.frequency_penalty, item.params.presence_penalty)
            for item in penalised
        ],
        logits.device,
    )
    values = logits[index]
    # As in CTRL (Keskar et al., 2019): reduce the logit for either sign.
    repeated = torch.where(values > 0, values / repetition, values * repetition)
    values = torch.where(in_prompt + in_output > 0, repeated, values)
    values -= frequency * in_output + presence * (in_output > 0)
    return logits.index_copy(0, index, values)


def _add_biases(logits: Tensor, inputs: Sequence[SamplingInput]) -> Tensor:
    vocab_size = logits.shape[-1]
    biases = {
        row * vocab_size + token_id: bias
        for row, item in enumerate(inputs)
        for token_id, bias in item.params.logit_bias.items()
    }
    if not biases:
        return logits
    cells = upload(list(biases), torch.int64, logits.device)
    values = upload(list(biases.values()), logits.dtype, logits.device)
    return logits.flatten().index_add(0, cells, values).view_as(logits)


def _apply_grammars(logits: Tensor, inputs: Sequence[SamplingInput]) -> Tensor:
    limited = {row: item.allowed_tokens for row, item in enumerate(inputs) if item.allowed_tokens is not None}
    if not limited:
        return logits
    index = upload(list(limited), torch.int64, logits.device)
    masks = bytearray().join(allowed_tokens() for allowed_tokens in limited.values())
    packed = np.frombuffer(masks, np.uint8).reshape(len(limited), -1)
    packed_masks = upload(packed, torch.uint8, logits.device)
    bit = torch.arange(8, dtype=torch.uint8, device=logits.device)
    bits = (packed_masks.unsqueeze(-1) >> bit).bitwise_and_(1).flatten(1)
    is_forbidden = bits[:, : logits.shape[-1]] == 0
    return logits.index_copy(0, index, logits[index].masked_fill_(is_forbidden, -torch.inf))


def _counts(token_ids: Sequence[IntView], logits: Tensor) -> Tensor:
    """Count tokens: [rows, vocab] in the logits' dtype, from `row -> tokens`."""
    vocab_size = logits.shape[-1]
    cells = np.concatenate([row * vocab_size + ids.astype(np.int64) for row, ids in enumerate(token_ids)])
    index = upload(cells, torch.int64, logits.device)
    counts = logits.new_zeros(len(token_ids) * vocab_size)
    return counts.scatter_add_(0, index, counts.new_ones(len(cells))).view(-1, vocab_size)


def _best(logits: Tensor, inputs: Sequence[SamplingInput]) -> Tensor:
    return logits.argmax(dim=-1)


def _draw(logits: Tensor, inputs: Sequence[SamplingInput]) -> Tensor:
    """Draw one token per row from all tokens."""
    numbers = [
        (item.params.temperature, number) for item, number in zip(inputs, _uniform(inputs), strict=True)
    ]
    temperature, uniform = _columns(numbers, logits.device)
    return _invert(_scaled(logits, temperature).softmax(dim=-1), uniform)


def _draw_truncated(logits: Tensor, inputs: Sequence[SamplingInput]) -> Tensor:
    """Draw one token per row from the more probable ones."""
    vocab_size = logits.shape[-1]
    numbers = [
        (p.temperature, p.top_k or vocab_size, p.top_p, p.min_p, number)
        for p, number in zip((item.params for item in inputs), _uniform(inputs), strict=True)
    ]
    temperature, *limits = _columns(numbers, logits.device)
    scaled = _scaled(logits, temperature)
    if logits.device.type != "cpu":  # a GPU cannot test whether fewer suffice without a wait
        return _draw_leading(scaled, vocab_size, limits)[0]
    token_ids, is_enough = _draw_leading(scaled, min(LEADING_TOKENS, vocab_size), limits)
    if not is_enough.all():
        rows = is_enough.logical_not().nonzero().squeeze(1)
        token_ids[rows], _ = _draw_leading(scaled[rows], vocab_size, [column[rows] for column in limits])
    return token_ids


def _draw_leading(scaled: Tensor, count: int, limits: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Draw one token per row from its `count` most probable ones.

    Args:
        scaled: [rows, vocab] logits over temperature; the largest in every row is 0.
        limits: top_k, top_p, min_p and a random number, [rows, 1] each.

    Returns:
        Tokens [rows] int64; and [rows] bool, True if a larger `count` would give the same token.
    """
    top_k, top_p, min_p, uniform = limits
    vocab_size = scaled.shape[-1]
    if count < vocab_size:
        values, order = scaled.topk(count, dim=-1)
    else:
        values, order = scaled.sort(dim=-1, descending=True, stable=True)
    weights = values.exp()  # relative to the most probable token
    weights = weights.masked_fill(torch.arange(count, device=scaled.device) >= top_k, 0.0)
    reached = weights.cumsum(dim=-1)
    total_weight = scaled.softmax(dim=-1).amax(dim=-1, keepdim=True).reciprocal()
    is_counted = top_k < vocab_size
    wanted = top_p * torch.where(is_counted, reached[:, -1:], total_weight)
    # A token stays while the earlier ones have not reached top_p; the first one always stays.
    dropped = (reached - weights >= wanted) | (weights < min_p)
    dropped[:, 0] = False
    ranks = _invert(weights.masked_fill(dropped, 0.0), uniform)
    has_end = (reached[:, -1:] >= wanted) | (weights[:, -1:] < min_p)
    is_enough = (top_k <= count) | (has_end & ~is_counted)
    return order.gather(1, ranks.unsqueeze(1)).squeeze(1), is_enough.squeeze(1)


def _scaled(logits: Tensor, temperature: Tensor) -> Tensor:
    # Relative to the largest logit first: a very low temperature then gives -inf, never nan.
    return (logits - logits.amax(dim=-1, keepdim=True)) / temperature


def _invert(weights: Tensor, uniform: Tensor) -> Tensor:
    """Return the index at which the cumulative weight exceeds `uniform` (in [0, 1)) of the total."""
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1:].contiguous()
    # `right`: never choose a token of weight 0, even if the random number is 0.
    index = torch.searchsorted(cumulative, uniform * total, right=True)
    # The same if the number was rounded to 1: clamp to the last token with weight, where the total is
    # reached. Without finite numbers no token qualifies; `sample` discards the result, but indices must be
    # valid.
    last = torch.searchsorted(cumulative, total).clamp_(max=weights.shape[-1] - 1)
    return torch.minimum(index, last).squeeze(1)


def _uniform(inputs: Sequence[SamplingInput]) -> Iterator[float]:
    philox = np.random.Philox(key=0)
    generator = np.random.Generator(philox)
    state: Any = philox.state
    for item in inputs:
        # Equal to a new generator with this key and counter, which would take ten times as long to make.
        state["state"] = {"key": (item.seed % 2**64, item.choice), "counter": (item.position, 0, 0, 0)}
        philox.state = state
        yield generator.random()


def _start_logprobs(
    logits: Tensor, inputs: Sequence[SamplingInput], chosen: Tensor
) -> Callable[[], Sequence[_RowLogprobs | None]]:
    """Start to compute requested log-probabilities; return a callback that waits, with one item per row."""
    asked = {row: k for row, item in enumerate(inputs) if (k := item.params.logprobs) is not None}
    if not asked:
        return lambda: [None] * len(inputs)
    index = upload(list(asked), torch.int64, logits.device)
    logprobs = logits[index].log_softmax(dim=-1)
    top = logprobs.topk(max(asked.values()))
    # The chosen token precedes the most probable ones. Float64 represents token ids exactly: one copy for
    # all.
    token_ids = torch.cat((chosen[index].unsqueeze(1), top.indices), dim=1)
    found = download(torch.stack((token_ids.double(), logprobs.gather(1, token_ids).double())))

    def wait() -> Sequence[_RowLogprobs | None]:
        rows: list[_RowLogprobs | None] = [None] * len(inputs)
        for (row, k), ids, values in zip(asked.items(), *found().tolist(), strict=True):
            first, *rest = (TokenLogprob(int(i), p) for i, p in zip(ids, values, strict=True))
            rows[row] = first, tuple(rest[:k])
        return rows

    return wait


def _columns(rows: Sequence[tuple[float, ...]], device: torch.device) -> tuple[Tensor, ...]:
    return torch.split(upload(rows, torch.float32, device), 1, dim=1)
