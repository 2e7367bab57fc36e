"""Trains the built-in model from nothing: corpus, tokenizer, weights, all into models/builtin/.

    python -m scripts.builtin.train            # about 35 minutes on two cores

The recipe: a byte-level BPE of 3,072 tokens, a Llama of 5.5 M parameters, AdamW with a cosine schedule,
loss on the assistant's tokens. Rows of 512 tokens first; the last sixth of the steps uses rows of the full
context, so that long chats work. Chats are packed into rows; a chat that a row cuts continues nowhere.
"""

import argparse
import math
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from scripts.builtin.checkpoint import BUILTIN, save_checkpoint
from scripts.builtin.corpus import CONVERSATIONS, SEED, Conversation, conversations
from scripts.builtin.tokenizer import BEGIN, END, ROLE_TOKENS, train_tokenizer

CONTEXT_TOKENS = 2048
SHORT_ROW_TOKENS = 512
STEP_TOKENS = 4096
STEPS = 2200
LONG_ROW_SHARE = 1 / 6
WARMUP_STEPS = 100
PEAK_LEARNING_RATE = 2e-3
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


def encode(tokenizer: Tokenizer, conversation: Conversation) -> tuple[list[int], list[int]]:
    """Return the chat's token ids and, of equal length, the labels: the token itself where it is learned."""
    special = tokenizer.get_vocab()
    ids: list[int] = [special[BEGIN]]
    labels = [IGNORED]
    for message in conversation:
        content: list[int] = [*tokenizer.encode(message.content).ids, special[END]]
        learned = message.role in ("assistant", "text")
        if message.role in ROLE_TOKENS:
            ids.append(special[ROLE_TOKENS[message.role]])
            labels.append(IGNORED)
        ids += content
        labels += content if learned else [IGNORED] * len(content)
    return ids, labels


def batches(
    encoded: list[tuple[list[int], list[int]]], row_tokens: int, count: int, rng: Random
) -> Iterator[tuple[Tensor, Tensor]]:
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


def learning_rate(step: int, steps: int) -> float:
    """Return the rate of this step: linear warm-up, then a cosine."""
    if step < WARMUP_STEPS:
        return PEAK_LEARNING_RATE * (step + 1) / WARMUP_STEPS
    progress = (step - WARMUP_STEPS) / max(1, steps - WARMUP_STEPS)
    return (
        FINAL_LEARNING_RATE
        + (PEAK_LEARNING_RATE - FINAL_LEARNING_RATE) * (1 + math.cos(math.pi * progress)) / 2
    )


def loss_of(model: LlamaForCausalLM, ids: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy over learned tokens; logits are computed for those positions alone."""
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
        targets = labels[:, 1:]
        learned = targets != IGNORED
        logits = model.lm_head(hidden[learned])
    return torch.nn.functional.cross_entropy(logits.float(), targets[learned])


def train(model: LlamaForCausalLM, encoded: list[tuple[list[int], list[int]]], steps: int, seed: int) -> None:
    """Train in place; prints loss and speed as it goes."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=PEAK_LEARNING_RATE, betas=(0.9, 0.95), fused=True)
    model.model.compile()
    rng = Random(seed)
    long_steps = round(steps * LONG_ROW_SHARE)
    step, recent_loss, started = 0, 0.0, time.perf_counter()
    for row_tokens, count in ((SHORT_ROW_TOKENS, steps - long_steps), (CONTEXT_TOKENS, long_steps)):
        for ids, labels in batches(encoded, row_tokens, count, rng):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, steps)
            loss = loss_of(model, ids, labels)
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            recent_loss += loss.item()
            if step % 50 == 0:
                elapsed_s = time.perf_counter() - started
                print(f"step {step}/{steps}  loss {recent_loss / 50:.4f}  {elapsed_s:.0f} s", flush=True)
                recent_loss = 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the built-in model.")
    parser.add_argument("--out", type=Path, default=BUILTIN, help="directory of the checkpoint")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--conversations", type=int, default=CONVERSATIONS)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)

    started = time.perf_counter()
    corpus = list(conversations(options.conversations, options.seed))
    tokenizer = train_tokenizer(message.content for chat in corpus for message in chat)
    encoded = [encode(tokenizer, chat) for chat in corpus]
    config = model_config(tokenizer)
    model = LlamaForCausalLM(config)
    print(
        f"{len(corpus)} chats, {sum(len(ids) for ids, _ in encoded)} tokens, "
        f"{sum(label != IGNORED for _, labels in encoded for label in labels)} learned; "
        f"{model.num_parameters()} parameters; {time.perf_counter() - started:.0f} s",
        flush=True,
    )
    train(model, encoded, options.steps, options.seed)
    save_checkpoint(model, config, tokenizer, options.out)
    print(f"{options.out}: {time.perf_counter() - started:.0f} s in all")


if __name__ == "__main__":
    main()
