"""Measures generation with drafts against generation without, in one engine, in alternating turns.

python -m benchmarks.speculation MODEL [--draft-model NAME] [--turns 3] [--tokens 160] [--prompts 10]
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from neo_desktop import Engine, SamplingParams
from neo_desktop.engine.batch import IterationPlan
from neo_desktop.engine.execute.executor import Wait
from neo_desktop.engine.request import Request
from neo_desktop.engine.schedule.speculation import Speculation
from neo_desktop.engine.speculate.drafter import Draft, Drafter, ModelDrafter
from neo_desktop.engine.speculate.ngram import NgramDrafter

REPOSITORY = Path(__file__).parents[1]
EDITED = ("int_array.py", "progress.py", "processes.py", "frames.py", "errors.py")  # in `engine`
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


Steps = list[tuple[int, float]]  # rows and seconds of the steps of decodes


class Comparison:
    """Runs prompts with and without drafts.

    Other programs delay single steps. So a step counts with the time of the fastest tenth of the steps with
    as many rows.

    Args:
        turns: pairs of runs.
        tokens: of an answer.
    """

    def __init__(self, engine: Engine, turns: int, tokens: int) -> None:
        self._engine = engine
        self._turns = turns
        self._params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        self._plans: list[IterationPlan] = []
        executor = engine._iterations.executor
        start = executor.start

        def noted(plan: IterationPlan) -> Wait:
            self._plans.append(plan)
            return start(plan)

        executor.start = noted  # type: ignore[method-assign]

    def run(self, prompts: Sequence[str], *, drafts: bool) -> tuple[Steps, list[list[int]]]:
        """Return the steps, and the answers."""
        engine, params = self._engine, replace(self._params, speculation=drafts)
        answers: list[list[int]] = [[] for _ in prompts]
        steps: Steps = []
        for index, prompt in enumerate(prompts):
            engine.add(str(index), engine.prepare(prompt, params))
        while engine.has_work:
            self._plans.clear()
            started = time.perf_counter()
            engine.collect()
            seconds = time.perf_counter() - started
            if self._plans and all(sequence.is_decode for sequence in self._plans[0].sequences):
                steps.append((self._plans[0].sub_batches[0].num_tokens, seconds))
            for output in engine.take_outputs():
                answers[int(output.request_id)] += [token.token_id for token in output.tokens]
        return steps, answers

    def gain(
        self,
        name: str,
        batches: Sequence[Sequence[str]],
        drafter: Drafter | None,
        model: ModelDrafter | None = None,
    ) -> None:
        """Print the gain over some batches of chats."""
        scheduler, encode = self._engine._scheduler, self._engine.input_processor.tokenizer.encode
        scheduler._speculation = Speculation(drafter, self._engine._cost_model, 256, model)
        totals = {True: 0.0, False: 0.0}
        for batch in batches:
            steps: dict[bool, list[Steps]] = {True: [], False: []}
            self.run(batch, drafts=False)
            for _ in range(self._turns):
                answers = []
                for drafts in (False, True):
                    taken, tokens = self.run(batch, drafts=drafts)
                    steps[drafts].append(taken)
                    answers.append(tokens)
                assert answers[0] == answers[1], "drafts changed an answer"
                if isinstance(drafter, Replay):
                    known = zip((tuple(encode(prompt)) for prompt in batch), answers[0], strict=True)
                    drafter.answers |= dict(known)
            seconds = {drafts: typical_seconds(runs) for drafts, runs in steps.items()}
            for drafts, took in seconds.items():
                totals[drafts] += took
            print(f"    {seconds[False] / seconds[True]:.2f}x, {len(steps[True][-1])} steps", flush=True)
        gain = totals[False] / totals[True]
        print(f"{name}: {totals[False]:.2f} s without drafts, {totals[True]:.2f} s with, {gain:.2f}x")
        print(f"    {scheduler.speculative}", flush=True)


def typical_seconds(runs: Sequence[Steps]) -> float:
    """Return the time of the last run, if each of its steps took as long as the fastest tenth of its size."""
    by_rows: dict[int, list[float]] = {}
    for rows, seconds in chain.from_iterable(runs):
        by_rows.setdefault(rows, []).append(seconds)
    fast = {rows: sorted(found)[len(found) // 10] for rows, found in by_rows.items()}
    return sum(fast[rows] for rows, _ in runs[-1])


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
