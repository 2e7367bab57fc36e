"""What a CPU-cache in 8 bits changes, on the built-in model and its development questions.

    python -m scripts.cpu_cache_effect

All KV lies in the CPU-cache (policy `fastdecode`). First every question is answered greedily with either
dtype. Then the answers of `auto` are read token by token with either dtype, so that both see the same
context, and the logits after each token are compared: its attention has read nothing but the cache.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from neo_desktop import Engine, SamplingParams
from neo_desktop.app.chat_template import ChatTemplate
from neo_desktop.engine.batch import IterationPlan, SamplingInput, ScheduledSequence, SubBatch
from neo_desktop.engine.execute.plan_executor import PlanExecutor
from neo_desktop.engine.int_array import IntArray
from neo_desktop.engine.kv.layout import BLOCK_SIZE
from neo_desktop.engine.kv.storage import KVPool, KVStorage
from neo_desktop.engine.placement import Place
from neo_desktop.models.decoder import Decoder
from scripts.builtin.checkpoint import BUILTIN
from scripts.builtin.evaluate import Case, load_cases

QUESTIONS = Path(__file__).resolve().parents[1] / "tests" / "builtin" / "development.json"
GREEDY = SamplingParams(max_tokens=120, temperature=0.0)
NO_TOKENS = IntArray().view()
AT_ONCE = 64  # chats that are read together


@dataclass(frozen=True)
class Chat:
    """A prompt and what `auto` answered."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


def answers(cases: Sequence[Case], dtype: str) -> tuple[Decoder, list[Chat], list[str]]:
    """Return the model, and the greedy answers with all KV in a CPU-cache of this dtype."""
    settings = json.loads((BUILTIN / "tokenizer_config.json").read_text(encoding="utf-8"))
    template = ChatTemplate(settings["chat_template"], {"bos_token": settings["bos_token"]})
    with Engine.from_pretrained(device="cpu", policy="fastdecode", cpu_cache_dtype=dtype) as engine:
        prompts = [engine.tokenizer.encode(template.render(case.messages)) for case in cases]
        outputs = engine.generate(prompts, GREEDY)
        chats = [Chat(tuple(p), o.token_ids) for p, o in zip(prompts, outputs, strict=True)]
        return engine._decoder, chats, [output.text for output in outputs]


def next_token_logits(decoder: Decoder, chats: Sequence[Chat], dtype: torch.dtype) -> Tensor:
    """Return the logits after each token of the answers but the last, [tokens, vocabulary]."""
    width = max(-(-(len(chat.prompt) + len(chat.answer)) // BLOCK_SIZE) for chat in chats)
    pool = KVPool(
        decoder.config, width * len(chats), BLOCK_SIZE, dtype, torch.device("cpu"), sinks=decoder.sinks
    )
    executor = PlanExecutor(decoder, KVStorage({Place.HOST: pool}))
    compute, seen = decoder.logits, []

    def recording(hidden: Tensor) -> Tensor:
        seen.append(compute(hidden))
        return seen[-1]

    def read(tokens: dict[int, Sequence[int]], start: dict[int, int], *, is_recorded: bool) -> None:
        sequences = tuple(
            ScheduledSequence(
                str(index),
                tuple(chunk),
                start[index],
                Place.HOST,
                IntArray(range(index * width, (index + 1) * width)).view(),
                SamplingInput(GREEDY, 0, 0, 0, NO_TOKENS, NO_TOKENS) if is_recorded else None,
            )
            for index, chunk in tokens.items()
        )
        executor.execute(IterationPlan((SubBatch(sequences),)))

    decoder.logits = recording
    read(
        {i: chat.prompt for i, chat in enumerate(chats)},
        dict.fromkeys(range(len(chats)), 0),
        is_recorded=False,
    )
    for step in range(max(len(chat.answer) for chat in chats) - 1):
        left = {i: chat for i, chat in enumerate(chats) if step < len(chat.answer) - 1}
        read(
            {i: [chat.answer[step]] for i, chat in left.items()},
            {i: len(chat.prompt) + step for i, chat in left.items()},
            is_recorded=True,
        )
    decoder.logits = compute
    executor.close()
    return torch.cat(seen)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what a CPU-cache in 8 bits changes.")
    parser.add_argument("--questions", type=Path, default=QUESTIONS)
    cases = load_cases(parser.parse_args().questions)
    decoder, chats, exact_texts = answers(cases, "auto")
    _, rounded_chats, rounded_texts = answers(cases, "int8")

    moved, kl, same = [], [], []
    for start in range(0, len(chats), AT_ONCE):
        part = [chat for chat in chats[start : start + AT_ONCE] if len(chat.answer) > 1]
        exact, rounded = (next_token_logits(decoder, part, dtype) for dtype in (decoder.dtype, torch.int8))
        p, q = exact.double().log_softmax(-1), rounded.double().log_softmax(-1)
        moved.append((exact - rounded).abs().mean(-1))
        kl.append((p.exp() * (p - q)).sum(-1))
        same.append(exact.argmax(-1) == rounded.argmax(-1))
    deviation = exact.std(-1).mean()
    all_moved, all_kl, all_same = (torch.cat(values).float() for values in (moved, kl, same))
    equal = sum(one.answer == other.answer for one, other in zip(chats, rounded_chats, strict=True))
    right = [
        sum(case.accepts(text) for case, text in zip(cases, texts, strict=True))
        for texts in (exact_texts, rounded_texts)
    ]
    print(f"{len(cases)} questions, {len(all_kl)} tokens, KV in {decoder.dtype} against int8")
    print(
        f"mean |logit difference| {all_moved.mean():.4f} (logits deviate by {deviation:.2f} from their mean)"
    )
    print(
        f"KL divergence, nats: mean {all_kl.mean():.2e}, 99th percentile {all_kl.quantile(0.99):.2e}, "
        f"largest {all_kl.max():.2e}"
    )
    print(f"the same greedy token after {int(all_same.sum())} of them")
    print(f"the same answer to {equal} of {len(cases)} questions; right answers: {right[0]} and {right[1]}")


if __name__ == "__main__":
    main()
