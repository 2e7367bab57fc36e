"""Models by the code of transformers, divided among ranks that are threads."""

from pathlib import Path

import torch
from dense_model import logits_of_all
from thread_ranks import ThreadSums, on_ranks
from torch import Tensor

from neo_desktop.models.checkpoint import open_checkpoint
from neo_desktop.models.decoder import Decoder
from neo_desktop.models.linear.dense import DENSE
from neo_desktop.models.linear.protocol import LinearForm
from neo_desktop.models.rank import Rank
from neo_desktop.models.ranks import form_of_rank
from neo_desktop.models.registry import load_model, stages_of
from neo_desktop.models.stages import Reduce, Stages

CPU = torch.device("cpu")
TOKENS = torch.randint(0, 300, (24,), generator=torch.Generator().manual_seed(1))


def part_of(
    path: Path, rank: Rank, reduce: Reduce | None = None, form: LinearForm = DENSE
) -> tuple[Decoder, Stages]:
    """Load a rank's part of a checkpoint."""
    checkpoint = open_checkpoint(path)
    model = load_model(checkpoint, checkpoint.config(), dtype=torch.float32, device=CPU, rank=rank, form=form)
    stages = stages_of(model, None, reduce, has_head=rank.number == 0)
    if not stages.has_head:  # its scores are numbers that nobody wants
        stages.logits = lambda _normed, out: out  # type: ignore[assignment, method-assign]
    return model, stages


def check_ranks(path: Path, count: int, form: LinearForm = DENSE, tolerance: float = 1e-5) -> list[Decoder]:
    """Compare the scores that ranks, each in a thread, compute together with those of the whole model."""
    sums = ThreadSums(count)
    ranks = [Rank(number, count) for number in range(count)]
    config = open_checkpoint(path).config()
    parts = [part_of(path, rank, sums.of(rank.number), form_of_rank(form, config, rank)) for rank in ranks]

    def logits(rank: Rank, _: Reduce) -> Tensor:
        model, stages = parts[rank.number]
        return logits_of_all(model, TOKENS, stages=stages)

    found = on_ranks(count, logits)[0]
    model, stages = part_of(path, Rank(), form=form)
    whole = logits_of_all(model, TOKENS, stages=stages)
    assert torch.linalg.vector_norm(found - whole) <= tolerance * torch.linalg.vector_norm(whole)
    return [part for part, _ in parts]
