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
