"""Ask the built-in model questions that are not in its corpus, and count the right answers.

    python -m research.builtin.evaluate                                  # the held-out set
    python -m research.builtin.evaluate --questions tests/builtin/development.json --failures

A question set is a list of chats. An answer is right if it matches every regular expression of `expect`.
"""

import argparse
import json
import re
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from research.builtin.checkpoint import BUILTIN

HELD_OUT = Path(__file__).resolve().parents[2] / "tests" / "builtin" / "heldout.json"


@dataclass(frozen=True)
class Case:
    """One chat that ends with a question, and patterns for its answer."""

    messages: list[dict[str, str]]
    expect: list[str]

    def accepts(self, answer: str) -> bool:
        """Return True if the answer matches every pattern, ignoring case."""
        return all(re.search(pattern, answer, re.IGNORECASE) for pattern in self.expect)


def load_cases(path: Path) -> list[Case]:
    """Read a question set."""
    return [Case(item["messages"], item["expect"]) for item in json.loads(path.read_text(encoding="utf-8"))]


def answers(directory: Path, chats: list[list[dict[str, str]]], max_tokens: int = 120) -> list[str]:
    """Return the greedy answer to each chat, computed by `transformers` in fp32."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32)
    texts = []
    for chat in chats:
        prompt = str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
        ids = tokenizer.backend_tokenizer.encode(prompt, add_special_tokens=False).ids
        texts.append(tokenizer.backend_tokenizer.decode(greedy(model, ids, max_tokens)))
    return texts


@torch.inference_mode()
def greedy(model: LlamaForCausalLM, prompt_ids: list[int], max_tokens: int) -> list[int]:
    """Return the likeliest continuation, without the token that ends it."""
    token_ids: list[int] = []
    step_ids, cache = prompt_ids, None
    while len(token_ids) < max_tokens:
        output = model(input_ids=torch.tensor([step_ids]), past_key_values=cache, use_cache=True)
        token_id, cache = int(output.logits[0, -1].argmax()), output.past_key_values
        if token_id == model.config.eos_token_id:
            break
        token_ids.append(token_id)
        step_ids = [token_id]
    return token_ids


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the built-in model.")
    parser.add_argument("--model", type=Path, default=BUILTIN)
    parser.add_argument("--questions", type=Path, default=HELD_OUT)
    parser.add_argument(
        "--failures", action="store_true", help="print the questions that were answered wrongly"
    )
    options = parser.parse_args()
    cases = load_cases(options.questions)
    given = answers(options.model, [case.messages for case in cases])
    right = 0
    for case, answer in zip(cases, given, strict=True):
        right += case.accepts(answer)
        if options.failures and not case.accepts(answer):
            print(f"  {case.messages[-1]['content']}\n    -> {answer}\n    expected {case.expect}")
    print(f"{right} of {len(cases)} right: {100 * right / len(cases):.1f} %")


if __name__ == "__main__":
    main()
