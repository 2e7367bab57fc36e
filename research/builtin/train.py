"""Train the built-in model, from scratch or further: corpus, tokenizer, weights, all into models/builtin/.

    python -m research.builtin.train            # about an hour on two mostly idle AVX-512 cores

The recipe: a byte-level BPE of 3,072 tokens, a Llama of 5.5 M parameters, loss on the assistant's tokens, one
cosine schedule. Choosing the right answer is harder to learn than its words. So more than half of the steps
see single questions with only the beginnings of their answers; then whole chats join. A row is one chat from
its start, as in use: with packed rows, a model learns to copy from earlier chats.

The model's card lists the runs that made the shipped weights.
"""

import argparse
import math
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from random import Random

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from research.builtin.checkpoint import BUILTIN, save_checkpoint
from research.builtin.corpus import SEED, Conversation, chats, questions
from research.builtin.tokenizer import BEGIN, END, ROLE_TOKENS, train_tokenizer

CONTEXT_TOKENS = 2048
QUESTION_ROWS = (24, 40, 80)  # tokens; each size is compiled once
CHAT_ROWS = (64, 128, 256, 512, CONTEXT_TOKENS)
STEP_TOKENS = 2048  # approximately
ANSWER_BEGINNING_TOKENS = 8
WARMUP_STEPS = 100
LEARNING_RATE = 2e-3
FINAL_LEARNING_RATE = 4e-5
STEPS = 7000
QUESTIONS_END, MIXED_END = 0.55, 0.9  # shares of the steps: questions; then both; then only chats
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
    """Return token ids and labels of equal length per chat; labels repeat the learned tokens."""
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


def beginning(ids: list[int], labels: list[int], digits: frozenset[int]) -> tuple[list[int], list[int]]:
    """Return a chat of one question with only the first tokens of its answer; sums stay whole."""
    start = next(i for i, label in enumerate(labels) if label != IGNORED)
    size = len(ids) if ids[start] in digits else start + ANSWER_BEGINNING_TOKENS
    return ids[:size], labels[:size]


def batches(encoded: Encoded, row_sizes: tuple[int, ...], rng: Random) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield input ids and labels, [rows, tokens] each, without end; a row is one chat and padding.

    Chats of similar length are collected to about STEP_TOKENS; longer ones than the longest row are cut.
    """
    waiting: dict[int, Encoded] = {size: [] for size in row_sizes}
    while True:
        for index in rng.sample(range(len(encoded)), len(encoded)):
            ids, labels = encoded[index]
            size = next((size for size in row_sizes if len(ids) <= size), row_sizes[-1])
            rows = waiting[size]
            rows.append((ids[:size], labels[:size]))
            if len(rows) < STEP_TOKENS // size:
                continue
            id_batch = torch.zeros(len(rows), size, dtype=torch.long)
            label_batch = torch.full((len(rows), size), IGNORED)
            for row, (row_ids, row_labels) in enumerate(rows):
                id_batch[row, : len(row_ids)] = torch.tensor(row_ids)
                label_batch[row, : len(row_ids)] = torch.tensor(row_labels)
            rows.clear()
            yield id_batch, label_batch


def learning_rate(step: int, num_steps: int, highest: float) -> float:
    """Return the learning rate of a step: a cosine, with a linear warm-up."""
    cosine = (1 + math.cos(math.pi * step / num_steps)) / 2
    rate = FINAL_LEARNING_RATE + (highest - FINAL_LEARNING_RATE) * cosine
    return rate * min(1.0, (step + 1) / WARMUP_STEPS)


def loss_of(model: LlamaForCausalLM, ids: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy over learned tokens; logits are computed for those positions alone."""
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
        targets = labels[:, 1:]
        learned = targets != IGNORED
        logits = model.lm_head(hidden[learned])
    return torch.nn.functional.cross_entropy(logits.float(), targets[learned])


def lessons(single: Encoded, whole: Encoded, num_steps: int, rng: Random) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the batches of the steps: questions first, then chats among them, then only chats."""
    questions_only = batches(single, QUESTION_ROWS, rng)
    chats_only = batches(whole, CHAT_ROWS, rng)
    for step in range(num_steps):
        share = step / num_steps
        with_questions = share < QUESTIONS_END or (share < MIXED_END and step % 3 == 0)
        yield next(questions_only if with_questions else chats_only)


def train(
    model: LlamaForCausalLM, steps: Iterable[tuple[Tensor, Tensor]], num_steps: int, highest_rate: float
) -> None:
    """Train in place; prints loss and time as it goes."""
    matrices = [p for name, p in model.named_parameters() if p.dim() > 1 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.dim() == 1 or "embed" in name]
    optimizers: tuple[torch.optim.Optimizer, ...] = (
        torch.optim.Muon(matrices, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    )
    model.model.compile(dynamic=False)
    recent_loss, started_s = 0.0, time.perf_counter()
    for step, (ids, labels) in enumerate(steps):
        loss = loss_of(model, ids, labels)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, num_steps, highest_rate)
            optimizer.step()
            optimizer.zero_grad()
        recent_loss += loss.item()
        if (step + 1) % 100 == 0:
            elapsed_s = time.perf_counter() - started_s
            print(f"step {step + 1}/{num_steps}  loss {recent_loss / 100:.4f}  {elapsed_s:.0f} s", flush=True)
            recent_loss = 0.0


def report(name: str, encoded: Encoded) -> None:
    """Print the size of a part of the corpus."""
    print(f"{len(encoded)} {name}, {sum(len(ids) for ids, _ in encoded)} tokens", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the built-in model.")
    parser.add_argument("--out", type=Path, default=BUILTIN, help="directory of the checkpoint")
    parser.add_argument("--start", type=Path, help="go on from this checkpoint, with its tokenizer")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--learning-rate", type=float, default=LEARNING_RATE)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    torch._dynamo.config.recompile_limit = 32  # one per row size

    if options.start is not None:
        tokenizer = Tokenizer.from_file(str(options.start / "tokenizer.json"))
        model = LlamaForCausalLM.from_pretrained(options.start, dtype=torch.float32)
    else:
        tokenizer = train_tokenizer(message.content for chat in chats(seed=options.seed) for message in chat)
        model = LlamaForCausalLM(model_config(tokenizer))
    digits = frozenset(tokenizer.get_vocab()[digit] for digit in "0123456789")
    single = [beginning(*chat, digits) for chat in encode(tokenizer, questions(seed=options.seed))]
    whole = encode(tokenizer, chats(seed=options.seed))
    report("questions", single)
    report("chats", whole)
    steps = lessons(single, whole, options.steps, Random(options.seed))
    train(model, steps, options.steps, options.learning_rate)
    save_checkpoint(model, tokenizer, options.out)


if __name__ == "__main__":
    main()
