"""Speed of models that run by Transformers code, against the decoders of this project.

    python -m benchmarks.traced_speed                            three families, float32 and bfloat16
    python -m benchmarks.traced_speed --families llama --dtypes bfloat16

The same random checkpoint of about 130 million parameters is loaded in both ways. All stages of an iteration
run without attention, which is equal for both, in turns. Prints medians.
"""

import argparse
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch

from neo_desktop.models.checkpoint import open_checkpoint
from neo_desktop.models.config import ModelConfig
from neo_desktop.models.registry import load_model, stages_of
from neo_desktop.models.stages import Stages
from neo_desktop.models.state import Scratch, State
from neo_desktop.models.traced.config import read_traced

CPU = torch.device("cpu")
FAMILIES = ("llama", "qwen3", "mistral")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SIZES = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 10,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 8000,
    "max_position_embeddings": 2048,
}


def save(folder: Path, family: str, dtype: torch.dtype) -> None:
    """Write a checkpoint with random weights."""
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - large
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: PLC0415 - large

    torch.manual_seed(0)
    config: Any = CONFIG_MAPPING[family]
    model = AutoModelForCausalLM.from_config(config(**SIZES)).to(dtype)
    model.save_pretrained(folder)


def iteration(stages: Stages, rows: int, dtype: torch.dtype) -> State:
    """Return the state for an iteration over this many tokens."""
    of = stages.config, rows, dtype, CPU
    state = State.empty(*of, Scratch.empty(*of))
    state.attention.normal_(0.0, 0.1)
    return state


def seconds(stages: Stages, state: State, normed: torch.Tensor, scores: torch.Tensor) -> float:
    """Run all stages; only a prompt's last token gets logits, as in an iteration."""
    ids = torch.arange(state.rows) % stages.config.vocab_size
    layers = stages.config.num_layers
    begun = time.perf_counter()
    stages.embed(ids, ids, state)
    for layer in range(layers):
        stages.advance(layer, state)
    stages.advance(layers, state)
    stages.final_norm(state, normed)
    stages.logits(normed[-len(scores) :], scores)
    return time.perf_counter() - begun


def compare(family: str, dtype: torch.dtype, sizes: list[int], least_seconds: float) -> None:
    """Print one row per size."""
    with TemporaryDirectory() as folder:
        save(Path(folder), family, dtype)
        checkpoint = open_checkpoint(Path(folder))
        configs = ModelConfig.from_pretrained(checkpoint.path), read_traced(checkpoint.path)
        both, made = [], []
        for config in configs:
            decoder = load_model(checkpoint, config, dtype=dtype, device=CPU)
            begun = time.perf_counter()
            both.append(stages_of(decoder, None))
            made.append(time.perf_counter() - begun)
        print(f"{family} {dtype}: exported and cut in {made[1]:.1f} s")
        for rows in sizes:
            scored = rows if rows <= 64 else 1
            states = [iteration(stages, rows, dtype) for stages in both]
            normed = torch.empty(rows, SIZES["hidden_size"], dtype=dtype)
            scores = torch.empty(scored, SIZES["vocab_size"], dtype=dtype)
            times: list[list[float]] = [[], []]
            until = time.perf_counter() + least_seconds
            while len(times[0]) < 5 or time.perf_counter() < until:
                for own, stages, state in zip(times, both, states, strict=True):
                    own.append(seconds(stages, state, normed, scores))
            written, traced = (median(own[1:]) * 1e3 for own in times)
            print(
                f"  {rows:4} rows: written {written:8.2f} ms, traced {traced:8.2f} ms: {traced / written:.2f}"
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=FAMILIES)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 32, 512])
    parser.add_argument("--seconds", type=float, default=4.0, help="for each size")
    args = parser.parse_args()
    for family in args.families:
        for dtype in args.dtypes:
            compare(family, DTYPES[dtype], args.rows, args.seconds)
