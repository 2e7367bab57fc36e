"""Trains the built-in model from nothing: corpus, tokenizer, weights, all into models/builtin/.

    python -m scripts.builtin.train            # about half an hour, one thread

The recipe: a byte-level BPE of 3,072 tokens, a Llama of 5.5 M parameters, loss on the assistant's tokens,
Muon and AdamW with a cosine schedule. Which answer a question wants is hard to learn, and the answers' own
words are easy: so most examples are single questions with only the beginnings of their answers, among whole
chats. Examples are packed into rows without seeing each other; the last steps have rows of the full context.
What a row cuts off is left out.
"""

import argparse
import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from random import Random

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from scripts.builtin.checkpoint import BUILTIN, save_checkpoint
from scripts.builtin.corpus import SEED, Conversation, chats, questions
from scripts.builtin.tokenizer import BEGIN, END, ROLE_TOKENS, train_tokenizer

CONTEXT_TOKENS = 2048
SHORT_ROW_TOKENS = 512
STEP_TOKENS = 2048
STEPS = 3700
LONG_ROW_STEPS = 300
ANSWER_BEGINNING_TOKENS = 8
WARMUP_STEPS = 100
PEAK_LEARNING_RATE = 2e-3
FINAL_LEARNING_RATE = 2e-5
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


@dataclass(frozen=True)
class Batch:
    """Token ids, labels and the number of the example that each token belongs to, all [rows, row_tokens]."""

    ids: Tensor
    labels: Tensor
    examples: Tensor

    def mask(self) -> Tensor:
        """Return [rows, 1, row_tokens, row_tokens]: true where a token may look: back, in its own example."""
        same = self.examples[:, None, :, None] == self.examples[:, None, None, :]
        return same & torch.ones(same.shape[-2:], dtype=torch.bool).tril()


def batches(encoded: Encoded, row_tokens: int, count: int, rng: Random) -> Iterator[Batch]:
    """Yield `count` batches of STEP_TOKENS tokens, each example once before any comes again."""
    order: list[int] = []
    for _ in range(count):
        shape = (STEP_TOKENS // row_tokens, row_tokens)
        batch = Batch(*(torch.zeros(shape, dtype=torch.long) for _ in range(3)))
        for row in range(shape[0]):
            filled = 0
            while filled < row_tokens:
                if not order:
                    order = rng.sample(range(len(encoded)), len(encoded))
                example = order.pop()
                ids, labels = encoded[example]
                span = slice(filled, min(filled + len(ids), row_tokens))
                size = span.stop - span.start
                batch.ids[row, span] = torch.tensor(ids[:size])
                batch.labels[row, span] = torch.tensor(labels[:size])
                batch.examples[row, span] = example
                filled = span.stop
        yield batch


def learning_rate(step: int, steps: int) -> float:
    """Return the rate of this step: linear warm-up, then a cosine."""
    if step < WARMUP_STEPS:
        return PEAK_LEARNING_RATE * (step + 1) / WARMUP_STEPS
    progress = (step - WARMUP_STEPS) / max(1, steps - WARMUP_STEPS)
    return (
        FINAL_LEARNING_RATE
        + (PEAK_LEARNING_RATE - FINAL_LEARNING_RATE) * (1 + math.cos(math.pi * progress)) / 2
    )


def loss_of(model: LlamaForCausalLM, batch: Batch) -> Tensor:
    """Return the mean cross-entropy over learned tokens; logits are computed for those positions alone."""
    with torch.autocast("cpu", torch.bfloat16):
        output = model.model(input_ids=batch.ids, attention_mask=batch.mask(), use_cache=False)
        targets = batch.labels[:, 1:]
        learned = targets != IGNORED
        logits = model.lm_head(output.last_hidden_state[:, :-1][learned])
    return torch.nn.functional.cross_entropy(logits.float(), targets[learned])


def train(model: LlamaForCausalLM, encoded: Encoded, steps: int, seed: int) -> None:
    """Train in place; prints loss and speed as it goes."""
    matrices = [p for name, p in model.named_parameters() if p.dim() > 1 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.dim() == 1 or "embed" in name]
    rate = PEAK_LEARNING_RATE
    optimizers: tuple[torch.optim.Optimizer, ...] = (
        torch.optim.Muon(matrices, lr=rate, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    )
    model.model.compile()
    rng = Random(seed)
    short = batches(encoded, SHORT_ROW_TOKENS, steps - LONG_ROW_STEPS, rng)
    long = batches(encoded, CONTEXT_TOKENS, LONG_ROW_STEPS, rng)
    recent_loss, started = 0.0, time.perf_counter()
    for step, batch in enumerate(chain(short, long)):
        loss = loss_of(model, batch)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, steps)
            optimizer.step()
            optimizer.zero_grad()
        recent_loss += loss.item()
        if step % 50 == 49:
            elapsed_s = time.perf_counter() - started
            print(f"step {step + 1}/{steps}  loss {recent_loss / 50:.4f}  {elapsed_s:.0f} s", flush=True)
            recent_loss = 0.0


def report(name: str, encoded: Encoded) -> None:
    """Print the size of a part of the corpus."""
    print(f"{len(encoded)} {name}, {sum(len(ids) for ids, _ in encoded)} tokens", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the built-in model.")
    parser.add_argument("--out", type=Path, default=BUILTIN, help="directory of the checkpoint")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)

    started = time.perf_counter()
    tokenizer = train_tokenizer(message.content for chat in chats(seed=options.seed) for message in chat)
    whole = encode(tokenizer, chats(seed=options.seed))
    single = [beginning(*chat) for chat in encode(tokenizer, questions(seed=options.seed))]
    report("questions", single)
    report("chats", whole)
    model = LlamaForCausalLM(model_config(tokenizer))
    train(model, single + whole, options.steps, options.seed)
    save_checkpoint(model, tokenizer, options.out)
    print(f"{options.out}: {(time.perf_counter() - started) / 60:.0f} minutes")


if __name__ == "__main__":
    main()
