"""Drafts by a layer of multi-token prediction: right ones, and unchanged answers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cost_models import machine
from predicting_models import save_chain, save_predicting

from neo_desktop import Engine, SamplingParams
from neo_desktop.engine.generate import Completion
from neo_desktop.engine.kv_tier import KVTier

COST = machine(cpu_token_ms=1e-6, offload_ms=0.0, token_ms=1e-6)
PARAMS = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
PROMPTS = [[5, 6, 7], [9] * 50, list(range(3, 93)), [9, 8] * 20]


def tokens_of(answers: list[Completion]) -> list[tuple[int, ...]]:
    return [answer.token_ids for answer in answers]


def answered(folder: Path, **options: Any) -> tuple[list[tuple[int, ...]], Any]:
    """Return the answers, and the statistics of drafts; drafting takes no time by the engine's prediction."""
    given = {"device": "cpu", "dtype": "float32", "cost_model": COST, "cpu_cache_tokens": 2048}
    with Engine.from_pretrained(folder, **(given | options)) as engine:
        speculation: Any = engine._scheduler._speculation
        if speculation is not None and speculation.model is not None:
            speculation.model.ms = lambda requests, width: 0.0
        answers = engine.generate(PROMPTS, PARAMS)
        stats = engine.stats().speculative
        if speculation is not None and speculation.model is not None:
            speculation.model.draft_all([], 1)
            assert speculation.model._kv.num_used_blocks(KVTier.DEVICE) == 0
    return tokens_of(answers), stats


def test_a_perfect_layer_is_always_right(tmp_path: Path) -> None:
    save_chain(tmp_path, "qwen3.5")
    answers, stats = answered(tmp_path, speculate="mtp")
    assert answers[0][:4] == (8, 9, 10, 11)
    assert stats.num_drafted_tokens > 20
    assert stats.num_accepted_tokens == stats.num_drafted_tokens
