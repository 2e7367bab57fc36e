"""Measures generation with drafts against generation without, in one engine, in alternating turns.

python -m benchmarks.speculation MODEL [--draft-model NAME] [--turns 3] [--tokens 160] [--prompts 10]
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from neo_desktop import Engine, SamplingParams
from neo_desktop.engine.batch import IterationPlan
from neo_desktop.engine.execute.executor import Wait
from neo_desktop.engine.request import Request
from neo_desktop.engine.schedule.speculation import Speculation
from neo_desktop.engine.speculate.drafter import Draft, Drafter, ModelDrafter
from neo_desktop.engine.speculate.ngram import NgramDrafter

REPOSITORY = Path(__file__).parents[1]
EDITED = ("int_array.py", "progress.py", "iterations.py", "frames.py", "errors.py")  # in `engine`
EXTRACTED = ("workers.md", "faq.md", "wsl2.md", "api.md", "bench.md")  # in `docs`
CHARS = 1600  # of a file
PROSE = (
    "Write a story about a lighthouse keeper who finds a letter.",
    "Explain why the sky is blue and sunsets are red.",
    "Describe a market in a small town on a winter morning.",
    "What should I consider before I adopt a dog?",
)
PERFECT_WIDTH = 4


@dataclass
class Replay:
    """Drafts from known answers."""

    answers: dict[tuple[int, ...], Sequence[int]]
    expected = (1.0,)

    def draft(self, request: Request, most: int) -> Draft:
        position = len(request.token_ids) - request.num_prompt_tokens
        answer = self.answers.get(request.prompt_token_ids, ())
        return Draft(answer[position : position + min(most, PERFECT_WIDTH)])


def chat(question: str) -> str:
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


def repeating() -> list[str]:
    """Return prompts whose answers repeat parts of the prompt."""
    begun = "Here is the file:\n\n"
    codes = [(REPOSITORY / "engine" / name).read_text()[:CHARS] for name in EDITED]
    pages = [(REPOSITORY / "docs" / name).read_text()[:CHARS] for name in EXTRACTED]
    edit = "Rename the first function of this file to `renamed`, and write the whole file again"
    extract = "Write down the sentences of this page word by word, one per line"
    return [chat(f"{edit}:\n\n{code}") + begun for code in codes] + [
        chat(f"{extract}:\n\n{page}") + begun for page in pages
    ]


class Turn(NamedTuple):
    """One run of some prompts."""

    seconds: float  # of the processor, in all threads of this process, in steps of decodes
    num_steps: int
    answers: list[list[int]]


class Comparison:
    """Runs prompts with and without drafts.

    Other programs delay steps, so processor time is compared.

    Args:
        turns: pairs of runs.
        tokens: of an answer.
    """

    def __init__(self, engine: Engine, turns: int, tokens: int) -> None:
        self._engine = engine
        self._turns = turns
        self._params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        self._plans: list[IterationPlan] = []
        executor = engine.executor
        start = executor.start

        def noted(plan: IterationPlan) -> Wait:
            self._plans.append(plan)
            return start(plan)

        executor.start = noted  # type: ignore[method-assign]

    def run(self, prompts: Sequence[str], *, drafts: bool) -> Turn:
        engine, params = self._engine, replace(self._params, speculation=drafts)
        answers: list[list[int]] = [[] for _ in prompts]
        seconds, num_steps = 0.0, 0
        for index, prompt in enumerate(prompts):
            engine.add(str(index), engine.prepare(prompt, params))
        while engine.has_work:
            self._plans.clear()
            started = time.process_time()
            engine.collect()
            for output in engine.take_outputs():
                answers[int(output.request_id)] += [token.token_id for token in output.tokens]
            if self._plans and all(sequence.is_decode for sequence in self._plans[0].sequences):
                seconds += time.process_time() - started
                num_steps += 1
        return Turn(seconds, num_steps, answers)

    def gain(
        self,
        name: str,
        batches: Sequence[Sequence[str]],
        drafter: Drafter | None,
        model: ModelDrafter | None = None,
    ) -> None:
        """Print the gain over some batches of chats, and the time that the decisions take."""
        scheduler, encode = self._engine._scheduler, self._engine.input_processor.tokenizer.encode
        speculation = Speculation(drafter, self._engine._cost_model, 256, model)
        decided = {each: Decided(speculation, each) for each in ("widened", "learn", "measure")}
        scheduler._speculation = speculation
        totals, num_steps = {True: 0.0, False: 0.0}, 0
        for batch in batches:
            seconds: dict[bool, list[float]] = {True: [], False: []}
            answers = [self.run(batch, drafts=False).answers]
            if isinstance(drafter, Replay):
                known = zip((tuple(encode(prompt)) for prompt in batch), answers[0], strict=True)
                drafter.answers |= dict(known)
            for turn in range(self._turns):
                for drafts in (False, True) if turn % 2 else (True, False):
                    for decision in decided.values():
                        decision.counts = drafts
                    taken = self.run(batch, drafts=drafts)
                    seconds[drafts].append(taken.seconds)
                    answers.append(taken.answers)
                    num_steps += taken.num_steps * drafts
            assert all(each == answers[0] for each in answers), "drafts changed an answer"
            took = {drafts: statistics.median(each) for drafts, each in seconds.items()}
            for drafts, seconds_of in took.items():
                totals[drafts] += seconds_of
            print(f"    {took[False] / took[True]:.2f}x", flush=True)
        gain = totals[False] / totals[True]
        print(f"{name}: {totals[False]:.2f} s without drafts, {totals[True]:.2f} s with, {gain:.3f}x")
        spent = ", ".join(f"{each} {1e6 * of.seconds / num_steps:.0f}" for each, of in decided.items())
        print(f"    {num_steps} steps with drafts; µs per step: {spent}")
        print(f"    {scheduler.speculative}", flush=True)


class Decided:
    """Measures a method of an object: this thread's processor time."""

    def __init__(self, owner: object, name: str) -> None:
        self.seconds = 0.0
        self.counts = True
        method = getattr(owner, name)

        def measured(*given: Any, **named: Any) -> Any:
            started = time.thread_time()
            found = method(*given, **named)
            self.seconds += self.counts * (time.thread_time() - started)
            return found

        setattr(owner, name, measured)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--prompts", type=int, default=10, help="of text that repeats its prompt")
    parser.add_argument("--policy", default="auto")
    parser.add_argument("--draft-model", help="measured as well, alone and with drafts from the text")
    given = parser.parse_args()
    with Engine.from_pretrained(given.model, policy=given.policy, draft_model=given.draft_model) as engine:
        compared = Comparison(engine, given.turns, given.tokens)
        prose = [chat(question) for question in PROSE]
        repeated = [[prompt] for prompt in repeating()[:: 10 // given.prompts]]
        speculation = engine._scheduler._speculation
        if speculation is not None and speculation.model is not None:
            compared.gain("prose, a draft model", [[each] for each in prose], None, speculation.model)
            compared.gain("repeated text, both drafters", repeated, NgramDrafter(), speculation.model)
        compared.gain("text that repeats its prompt", repeated, NgramDrafter())
        compared.gain("prose", [[prompt] for prompt in prose], NgramDrafter())
        compared.gain("16 chats of prose", [prose * 4], NgramDrafter())
        compared.gain(f"perfect drafts of {PERFECT_WIDTH}", [[prompt] for prompt in prose], Replay({}))


if __name__ == "__main__":
    main()
