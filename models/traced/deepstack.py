"""Values of an image's rows that enter later layers (DeepStack of Qwen3-VL); zero for other rows."""

from typing import Any

import torch
from torch import Tensor, nn

from neo_desktop.models.traced.decoder import TracedDecoder
from neo_desktop.models.traced.sizes import stand_in

MODEL_TYPES = ("qwen3_vl", "qwen3_vl_moe")


# The values [1, rows, width] for token_ids [1, rows].
deepstack = stand_in(
    "deepstack",
    "(Tensor token_ids, int width, ScalarType dtype) -> Tensor",
    lambda token_ids, width, dtype: torch.empty(
        *token_ids.shape, width, dtype=dtype, device=token_ids.device
    ),
)


class DeepStack(nn.Module):
    """The values [1, rows, width], from `TracedDecoder.given`: behind the embeddings of its rows."""

    def __init__(self, decoder: TracedDecoder, width: int) -> None:
        super().__init__()
        self._decoder, self._width = decoder, width

    def forward(self, token_ids: Tensor) -> Tensor:
        values = torch.zeros(
            *token_ids.shape, self._width, dtype=self._decoder.dtype, device=token_ids.device
        )
        given = self._decoder.given
        return values if given is None else values.index_copy_(1, given[0], given[1][None, :, -self._width :])


def width_of(config: Any) -> int:
    """Return the values per row of a model of `transformers`; 0: it has none."""
    if config.model_type not in MODEL_TYPES:
        return 0
    return len(config.vision_config.deepstack_visual_indexes) * int(config.text_config.hidden_size)


def add_to(model: Any) -> None:
    """Let the first layers of a model's text add the values, as the model does for images."""
    width, hidden = width_of(model.config), model.config.get_text_config().hidden_size
    if not width:
        return
    token_ids: list[Tensor] = []
    values: list[Tensor] = []

    def begin(_: nn.Module, __: Any, given: dict[str, Any]) -> None:
        token_ids[:] = [given["input_ids"]]

    def embedded(*_: Any) -> None:
        values[:] = deepstack(*token_ids, width, model.dtype).split(hidden, dim=-1)

    text = model.base_model.language_model
    model.register_forward_pre_hook(begin, with_kwargs=True)
    text.register_forward_pre_hook(embedded)
    for level, layer in enumerate(text.layers[: width // hidden]):
        layer.register_forward_hook(lambda _, __, out, level=level: out + values[level])
