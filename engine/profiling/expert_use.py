"""How often each expert of a model is chosen: counted where some lie in host memory, and remembered.

At the next start those that are used most come first, of each layer: so they are resident, or else streamed
for prompts, and the CPU computes those that few rows need.
"""

import logging
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from neo_desktop.engine.cache_files import cache_folder, digest, read_json, write_json
from neo_desktop.models.config import ModelConfig
from neo_desktop.models.decoder import Decoder
from neo_desktop.models.experts_config import ExpertsConfig

logger = logging.getLogger(__name__)

MOST_CHOICES = 10_000_000  # of a layer, that are remembered: beyond that, older ones count less and less


class ExpertUse:
    """What is known of a model's experts.

    Args:
        model: where its checkpoint lies; another model there with as many experts is taken for the same.
        experts: of the model.
    """

    def __init__(self, model: Path, experts: ExpertsConfig) -> None:
        self._experts = experts
        shape = [experts.count, experts.per_token, *experts.layers]
        self._key = {"model": str(model.resolve()), "experts": shape}
        self._path = cache_folder("experts") / f"{digest(self._key)}.json"
        self._counts = self._read()  # [layers, experts] int64, by the checkpoint's numbers

    @property
    def num_choices(self) -> int:
        """How often an expert was chosen, of all layers; 0: nothing is known."""
        return int(self._counts.sum())

    @property
    def order(self) -> tuple[tuple[int, ...], ...] | None:
        """The experts of each layer, those used most first; None: nothing is known. See `ExpertsConfig`."""
        if not self.num_choices:
            return None
        orders = self._counts.argsort(dim=1, descending=True, stable=True).tolist()
        return tuple(tuple(order) for order in orders)

    @property
    def which(self) -> str:
        """Which experts are on the device where not all are, for people."""
        if not self.num_choices:
            return "the first ones, since it is not known yet which are used most"
        return f"those that were used most, by {self.num_choices:,} choices"

    def ordered(self, config: ModelConfig) -> ModelConfig:
        """Return the model's configuration with experts in that order."""
        return replace(config, experts=replace(self._experts, order=self.order))

    @staticmethod
    def begin(decoder: Decoder) -> None:
        """Forget what was counted: measurements and first iterations are nobody's use."""
        if decoder.expert_use is not None:
            decoder.expert_use.zero_()

    def keep(self, decoder: Decoder) -> None:
        """Remember what was counted since `begin` or the last time; this waits for the device."""
        use, experts = decoder.expert_use, decoder.config.experts
        if use is None or experts is None:
            return
        found = use.cpu()[:, : experts.count].long()
        use.zero_()
        if not found.any():
            return
        for counts, layer in zip(self._counts, experts.layers, strict=True):
            counts[torch.tensor(experts.order_of(layer))] += found[layer]
        totals = self._counts.sum(dim=1, keepdim=True)
        self._counts = torch.where(
            totals > MOST_CHOICES, self._counts * MOST_CHOICES // totals.clamp(min=1), self._counts
        )
        trouble = "which experts are used most cannot be remembered"
        write_json(self._path, {"key": self._key, "counts": self._counts.tolist()}, trouble)

    def _read(self) -> Tensor:
        shape = len(self._experts.layers), self._experts.count
        data = read_json(self._path)
        if data is not None and data.get("key") == self._key:
            try:
                counts = torch.tensor(data["counts"], dtype=torch.int64)
            except (KeyError, TypeError, ValueError, RuntimeError):
                counts = torch.tensor(-1)
            if counts.shape == shape and counts.min() >= 0:
                return counts
            logger.warning("%s is damaged: which experts are used most is counted again", self._path)
        return torch.zeros(shape, dtype=torch.int64)
