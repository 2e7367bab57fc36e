"""Models with matrices on the device and in host memory."""

import random

from offloaded_case import random_split
from pipeline_case import tiny_config, tiny_model

from neo_desktop.models.decoder import Decoder
from neo_desktop.models.linear.dense import DENSE, Dense
from neo_desktop.models.linear.offloaded import OffloadedFormat
from neo_desktop.models.linear.shares import StreamedShares

SHARES = (0.0, 0.3, 0.5, 1.0)
WINDOWS = (None, 11, None, 3)


def split_model(seed: int, windows: tuple[int | None, ...] = WINDOWS, share: float | None = None) -> Decoder:
    """Return a model whose matrices are offloaded at any row, as a whole, or not at all.

    Args:
        share: streamed share of the rows in host memory; None: shares depend on the number of rows.
    """
    form = random_split(tiny_config(windows), seed, device_form=Dense(uses_tiles=False), host_form=DENSE)
    return divided(tiny_model(windows, form=form), seed, share)


def host_model(share: float, windows: tuple[int | None, ...] = WINDOWS) -> Decoder:
    """Return a model with all layer matrices in host memory."""
    names = [name for name, _ in tiny_config(windows).each_matrix() if name != "head"]
    form = OffloadedFormat(Dense(uses_tiles=False), DENSE, dict.fromkeys(names, 0))
    return divided(tiny_model(windows, form=form), 0, share)


def divided(model: Decoder, seed: int, share: float | None) -> Decoder:
    assert model.has_splits
    rng = random.Random(seed)
    rows = tuple(sorted(rng.sample(range(1, 40), 4)))
    model.streamed_shares = StreamedShares(rows, tuple(sorted(rng.choices(SHARES, k=4))))
    if share is not None:
        model.streamed_shares = StreamedShares((1,), (share,))
    return model
