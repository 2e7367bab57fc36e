"""Measures generation with drafts against generation without, in one engine, in alternating turns.

python -m benchmarks.speculation MODEL [--turns 3] [--tokens 160]
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from neo_desktop import Engine, SamplingParams
from neo_desktop.engine.request import Request
from neo_desktop.engine.schedule.speculation import Speculation
from neo_desktop.engine.speculate.drafter import Draft, Drafter
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


class Comparison:
    """Runs prompts with and without drafts.

    Args:
        turns: pairs of runs; the best run with and the best run without drafts count.
        tokens: of an answer.
    """

    def __init__(self, engine: Engine, turns: int, tokens: int) -> None:
        self._engine = engine
        self._turns = turns
        self._params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)

    def seconds(self, prompts: Sequence[str], *, drafts: bool) -> tuple[float, list[tuple[int, ...]]]:
        """Return the time of an answer whose prompt is in the prefix cache, and the answers."""
        params = replace(self._params, speculation=drafts)
        started = time.perf_counter()
        answers = self._engine.generate(prompts, params)
        return time.perf_counter() - started, [answer.token_ids for answer in answers]

    def gain(self, name: str, batches: Sequence[Sequence[str]], drafter: Drafter) -> None:
        """Print the gain over some batches of chats."""
        scheduler = self._engine._scheduler
        parts = self._engine._kv_cache, self._engine._cost_model
        best = {True: 0.0, False: 0.0}
        for batch in batches:
            seconds: dict[bool, list[float]] = {True: [], False: []}
            self.seconds(batch, drafts=False)
            scheduler._speculation = Speculation(drafter, parts[1], len(batch) * 9 + 16)
            for _ in range(self._turns):
                answers = []
                for drafts in (False, True):
                    took, tokens = self.seconds(batch, drafts=drafts)
                    seconds[drafts].append(took)
                    answers.append(tokens)
                assert answers[0] == answers[1], "drafts changed an answer"
                if isinstance(drafter, Replay):
                    ids = self._engine.input_processor.tokenizer.encode
                    for prompt, tokens in zip(batch, answers[0], strict=True):
                        drafter.answers[tuple(ids(prompt, True))] = tokens
            for drafts, found in seconds.items():
                best[drafts] += min(found)
            print(f"    {min(seconds[False]) / min(seconds[True]):.2f}x  {scheduler.speculative}", flush=True)
        print(
            f"{name}: {best[False]:.2f} s without drafts, {best[True]:.2f} s with: "
            f"{best[False] / best[True]:.2f}x",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--policy", default="auto")
    given = parser.parse_args()
    with Engine.from_pretrained(given.model, policy=given.policy) as engine:
        compared = Comparison(engine, given.turns, given.tokens)
        prose = [chat(question) for question in PROSE]
        compared.gain("text that repeats its prompt", [[prompt] for prompt in repeating()], NgramDrafter())
        compared.gain("prose", [[prompt] for prompt in prose], NgramDrafter())
        compared.gain("16 chats of prose", [prose * 4], NgramDrafter())
        compared.gain("16 chats that repeat", [(repeating() * 2)[:16]], NgramDrafter())
        compared.gain(f"perfect drafts of {PERFECT_WIDTH}", [[prompt] for prompt in prose], Replay({}))


if __name__ == "__main__":
    main()
