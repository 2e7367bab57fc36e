"""Trains the built-in model from nothing: corpus, tokenizer, weights, all into models/builtin/.

    python -m scripts.builtin.train            # three quarters of an hour, one thread

The recipe: a byte-level BPE of 3,072 tokens, a Llama of 5.5 M parameters, loss on the assistant's tokens,
two rounds with a cosine schedule each. Which answer a question wants is hard to learn, and the answers' own
words are easy: so each round begins with single questions and only the beginnings of their answers. Then come
whole chats, at last in rows of the full context. Chats are packed into rows; what a row cuts off is left out.
"""

import argparse
import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from scripts.builtin.checkpoint import BUILTIN, save_checkpoint
from scripts.builtin.corpus import SEED, Conversation, chats, more_chats, more_questions, questions
from scripts.builtin.tokenizer import BEGIN, END, ROLE_TOKENS, train_tokenizer

CONTEXT_TOKENS = 2048
SHORT_ROW_TOKENS = 512
STEP_TOKENS = 2048
ANSWER_BEGINNING_TOKENS = 8
WARMUP_STEPS = 100
FIRST_LEARNING_RATE = 2e-3
SECOND_LEARNING_RATE = 1.2e-3
FINAL_LEARNING_RATE = 4e-5
IGNORED = -100


def model_config(tokenizer: Tokenizer) -> LlamaConfig:
    """Return the shape of the built-in model."""
    return LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=CONTEXT_TOKENS,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        attention_bias=False,
        bos_token_id=tokenizer.token_to_id(BEGIN),
        eos_token_id=tokenizer.token_to_id(END),
        pad_token_id=tokenizer.token_to_id(END),
    )


Encoded = list[tuple[list[int], list[int]]]


def encode(tokenizer: Tokenizer, conversations: Iterable[Conversation]) -> Encoded:
    """Return each chat's token ids and, of equal length, the labels: the token itself where it is learned."""
    special = tokenizer.get_vocab()
    chosen = list(conversations)
    contents = iter(tokenizer.encode_batch_fast([message.content for chat in chosen for message in chat]))
    encoded = []
    for chat in chosen:
        ids, labels = [special[BEGIN]], [IGNORED]
        for message in chat:
            content = [*next(contents).ids, special[END]]
            learned = message.role in ("assistant", "text")
            if message.role in ROLE_TOKENS:
                ids.append(special[ROLE_TOKENS[message.role]])
                labels.append(IGNORED)
            ids += content
            labels += content if learned else [IGNORED] * len(content)
        encoded.append((ids, labels))
    return encoded


def beginning(ids: list[int], labels: list[int]) -> tuple[list[int], list[int]]:
    """Return a chat of one question with only the first tokens of its answer."""
    size = next(i for i, label in enumerate(labels) if label != IGNORED) + ANSWER_BEGINNING_TOKENS
    return ids[:size], labels[:size]


def batches(encoded: Encoded, row_tokens: int, count: int, rng: Random) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield `count` pairs of input ids and labels, both [STEP_TOKENS / row_tokens, row_tokens]."""
    rows_per_step = STEP_TOKENS // row_tokens
    order: list[int] = []
    for _ in range(count):
        ids = torch.zeros(rows_per_step, row_tokens, dtype=torch.long)
        labels = torch.full((rows_per_step, row_tokens), IGNORED)
        for row in range(rows_per_step):
            filled = 0
            while filled < row_tokens:
                if not order:
                    order = rng.sample(range(len(encoded)), len(encoded))
                chat_ids, chat_labels = encoded[order.pop()]
                size = min(len(chat_ids), row_tokens - filled)
                ids[row, filled : filled + size] = torch.tensor(chat_ids[:size])
                labels[row, filled : filled + size] = torch.tensor(chat_labels[:size])
                filled += size
        yield ids, labels


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Return the rate of this step: linear warm-up, then a cosine."""
    if step < WARMUP_STEPS:
        return peak * (step + 1) / WARMUP_STEPS
    progress = (step - WARMUP_STEPS) / max(1, steps - WARMUP_STEPS)
    return FINAL_LEARNING_RATE + (peak - FINAL_LEARNING_RATE) * (1 + math.cos(math.pi * progress)) / 2


def loss_of(model: LlamaForCausalLM, ids: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy over learned tokens; logits are computed for those positions alone."""
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
        targets = labels[:, 1:]
        learned = targets != IGNORED
        logits = model.lm_head(hidden[learned])
    return torch.nn.functional.cross_entropy(logits.float(), targets[learned])


@dataclass(frozen=True)
class Lesson:
    """A stretch of training: what is learned, in rows of which length, for how many steps."""

    encoded: Encoded
    row_tokens: int
    steps: int


def train(model: LlamaForCausalLM, lessons: list[Lesson], peak: float, seed: int) -> None:
    """Train one round in place; prints loss and speed as it goes."""
    matrices = [p for name, p in model.named_parameters() if p.dim() > 1 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.dim() == 1 or "embed" in name]
    optimizers = (
        torch.optim.Muon(matrices, lr=peak, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=peak, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    )
    model.model.compile()
    rng = Random(seed)
    steps = sum(lesson.steps for lesson in lessons)
    step, recent_loss, started = 0, 0.0, time.perf_counter()
    for lesson in lessons:
        for ids, labels in batches(lesson.encoded, lesson.row_tokens, lesson.steps, rng):
            loss = loss_of(model, ids, labels)
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate(step, steps, peak)
                optimizer.step()
                optimizer.zero_grad()
            step += 1
            recent_loss += loss.item()
            if step % 50 == 0:
                elapsed_s = time.perf_counter() - started
                print(f"step {step}/{steps}  loss {recent_loss / 50:.4f}  {elapsed_s:.0f} s", flush=True)
                recent_loss = 0.0


def first_round(seed: int) -> tuple[LlamaForCausalLM, Tokenizer]:
    """Make the tokenizer and train a new model: questions first, then chats, then rows of the full context."""
    tokenizer = train_tokenizer(message.content for chat in chats(seed=seed) for message in chat)
    whole = encode(tokenizer, chats(seed=seed))
    single = [beginning(*chat) for chat in encode(tokenizer, questions(seed=seed))]
    report("questions", single)
    report("chats", whole)
    model = LlamaForCausalLM(model_config(tokenizer))
    lessons = [
        Lesson(single, SHORT_ROW_TOKENS, 1612),
        Lesson(whole, SHORT_ROW_TOKENS, 624),
        Lesson(whole, CONTEXT_TOKENS, 364),
    ]
    train(model, lessons, FIRST_LEARNING_RATE, seed)
    return model, tokenizer


def second_round(model: LlamaForCausalLM, tokenizer: Tokenizer, seed: int) -> None:
    """Train on: mostly sums, which take longest to learn, then new chats."""
    single = [beginning(*chat) for chat in encode(tokenizer, more_questions(seed))]
    whole = encode(tokenizer, more_chats(seed))
    report("questions", single)
    report("chats", whole)
    lessons = [Lesson(single, SHORT_ROW_TOKENS, 1100), Lesson(whole, CONTEXT_TOKENS, 600)]
    train(model, lessons, SECOND_LEARNING_RATE, seed + 1)


def report(name: str, encoded: Encoded) -> None:
    """Print the size of a part of the corpus."""
    print(f"{len(encoded)} {name}, {sum(len(ids) for ids, _ in encoded)} tokens", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the built-in model.")
    parser.add_argument("--out", type=Path, default=BUILTIN, help="directory of the checkpoint")
    parser.add_argument("--start", type=Path, help="checkpoint after the first round: do only the second")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)

    started = time.perf_counter()
    if options.start is None:
        model, tokenizer = first_round(options.seed)
        save_checkpoint(model, tokenizer, options.out)
    else:
        model = LlamaForCausalLM.from_pretrained(options.start, dtype=torch.float32)
        tokenizer = Tokenizer.from_file(str(options.start / "tokenizer.json"))
    second_round(model, tokenizer, options.seed)
    save_checkpoint(model, tokenizer, options.out)
    print(f"{options.out}: {(time.perf_counter() - started) / 60:.0f} minutes")


if __name__ == "__main__":
    main()
