"""Greedy answers of an engine with workers, step by step."""

import time
from collections.abc import Callable
from pathlib import Path

import torch
from checkpoints import VOCAB_SIZE, transformers_greedy
from cost_models import machine

from neo_desktop import Engine, SamplingParams
from neo_desktop.engine.kv_tier import KVTier
from neo_desktop.engine.request import FinishReason

ONE = KVTier.worker(1)
NUM_TOKENS = 48
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)


def prompts(count: int = 6) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(VOCAB_SIZE, (40 + 7 * n,), generator=generator).tolist() for n in range(count)]


def make_engine(
    checkpoint: Path,
    secret: Path,
    workers: str,
    *,
    gpu_cache_tokens: int = 160,
    timeout_s: float = 10.0,
    policy: str = "neo",
) -> Engine:
    return Engine.from_pretrained(
        checkpoint,
        device="cpu",
        policy=policy,
        gpu_cache_tokens=gpu_cache_tokens,
        cpu_cache_tokens=0,
        workers=workers,
        worker_secret=secret,
        worker_timeout_s=timeout_s,
        cost_model=machine(cpu_token_ms=1e-6, offload_ms=0.0),
    )


class Answers:
    """Answers of an engine to all prompts, step by step."""

    def __init__(self, engine: Engine, batch: list[list[int]]) -> None:
        self._engine = engine
        self._batch = batch
        self._ask()

    def _ask(self) -> None:
        self.tokens: dict[str, list[int]] = {str(n): [] for n in range(len(self._batch))}
        self.reasons: dict[str, FinishReason] = {}
        for name, prompt in zip(self.tokens, self._batch, strict=True):
            self._engine.add(name, self._engine.prepare(prompt, GREEDY))

    def step(self) -> None:
        for output in self._engine.step():
            self.tokens[output.request_id] += [token.token_id for token in output.tokens]
            if output.finish_reason is not None:
                self.reasons[output.request_id] = output.finish_reason

    def until(self, is_enough: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while self._engine.has_work and not is_enough():
            self.step()
            assert time.monotonic() < deadline

    def until_back(self, tier: KVTier, timeout_s: float = 60.0) -> None:
        """Run steps until a lost tier is used again."""
        deadline = time.monotonic() + timeout_s
        while not self._engine.stats().num_running_at[tier]:
            if not self._engine.has_work:  # too early: add the requests again
                self._ask()
            self.step()
            assert time.monotonic() < deadline

    def end(self) -> list[list[int]]:
        self.until(lambda: False)
        return list(self.tokens.values())


def expected(checkpoint: Path, batch: list[list[int]]) -> list[list[int]]:
    return [transformers_greedy(checkpoint, prompt, NUM_TOKENS) for prompt in batch]
