"""Drafters that know the fake model's tokens, and are right as often as a test wants."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

from engine_fakes import next_token

from neo_desktop.engine.request import Request
from neo_desktop.engine.speculate.drafter import Draft


@dataclass
class OftenRight:
    """Drafts of random lengths; each token is right with the probability `share`."""

    share: float
    random: Random = field(default_factory=lambda: Random(0))
    expected = (0.9,)

    def draft(self, request: Request, most: int) -> Draft:
        tokens, drafted = list(request.token_ids), []
        for _ in range(self.random.randint(0, most)):
            token = next_token(tokens) + (self.random.random() >= self.share)
            drafted.append(token)
            tokens.append(token)
        return Draft(drafted)


@dataclass
class OftenRightModel:
    """A model with the drafts of `OftenRight`; each token takes `step_ms`, which it adds up in `spent_ms`."""

    share: float
    step_ms: float
    expected: float = 0.6
    has_drafts: bool = True
    spent_ms: float = 0.0
    most_requests = 16
    kept = None

    def __post_init__(self) -> None:
        self.random = Random(0)

    def is_able(self, request: Request) -> bool:
        return self.has_drafts

    def ms(self, requests: Sequence[Request], width: int) -> float:
        return width * self.step_ms

    def draft_all(self, requests: Sequence[Request], width: int) -> list[Sequence[int]]:
        self.spent_ms += self.ms(requests, width)
        return [self._draft(request, width) for request in requests]

    def _draft(self, request: Request, width: int) -> list[int]:
        tokens = list(request.token_ids)
        for _ in range(width):
            tokens.append(next_token(tokens) + (self.random.random() >= self.share))
        return tokens[len(request.token_ids) :]


@dataclass
class Informed:
    """Drafts from answers by (prompt, choice); each token is right with the probability `share`."""

    answers: Mapping[tuple[tuple[int, ...], int], Sequence[int]]
    share: float
    random: Random = field(default_factory=lambda: Random(0))
    expected = (0.9,)

    def draft(self, request: Request, most: int) -> Draft:
        done = len(request.token_ids) - request.num_prompt_tokens
        answer = self.answers[request.prompt_token_ids, request.choice][done : done + most]
        return Draft([token ^ (self.random.random() >= self.share) for token in answer])
