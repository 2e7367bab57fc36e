"""The source and the sizes of a `transformers` model, which are known before it is loaded."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from logging import ERROR
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch import Tensor

from neo_desktop.models.experts_config import ExpertsConfig, Gating
from neo_desktop.models.matrices import Matrix


@dataclass(frozen=True, slots=True)
class Source:
    """A folder with a config.json, or a file with equivalent metadata.

    Args:
        config_json: contents of a config.json derived from a file; None: a folder.
        untied: parameters that are separate weights, although the configuration ties them.
        transposed: linear layers whose columns are sorted by a head's number in its group, not by group, as
            (end of the module's name, groups, heads per group).
        is_long: LongRoPE has the frequencies of prompts beyond the original context, for all prompts.
        predicts: not a whole model, but a "layer" of multi-token prediction, see `predicting`, or an
            "assistant", see `assistant`; empty: a whole model.
    """

    path: Path
    config_json: str | None = None
    untied: tuple[str, ...] = ()
    transposed: tuple[tuple[str, int, int], ...] = ()
    is_long: bool = False
    predicts: Literal["", "layer", "assistant"] = ""

    @property
    def named(self) -> Path:
        return self.path / "config.json" if self.config_json is None else self.path

    @property
    def modified_ns(self) -> int:
        """Time of the last change, for caches."""
        return self.named.stat().st_mtime_ns

    def config(self) -> Any:
        """Return the configuration. Raises exceptions of transformers; ImportError if it is not installed."""
        from transformers import AutoConfig  # noqa: PLC0415 - large, and rarely needed

        if self.config_json is None:
            return AutoConfig.from_pretrained(self.path, local_files_only=True, trust_remote_code=False)
        return AutoConfig.for_model(**json.loads(self.config_json))


@dataclass(frozen=True, slots=True)
class Mixed:
    """A layer's mixture of experts; some have no gates."""

    gate_up: str  # the parameter [experts, 2 * intermediate, hidden], or [experts, intermediate, hidden]
    down: str  # the parameter [experts, hidden, intermediate]
    matrices: tuple[Matrix, ...]  # gates, ups and downs, or ups and downs, each with the experts' stacked
    gating: Gating = "silu"

    @property
    def hidden_size(self) -> int:
        """Width of the experts' inputs and outputs."""
        return self.matrices[-1].part_rows[0]

    @property
    def config(self) -> ExpertsConfig:
        """Sizes of the experts, without the numbers of layers."""
        down = self.matrices[-1]
        return ExpertsConfig(down.experts, down.per_token, down.columns, (), gating=self.gating)

    def of(self, parameter: str) -> tuple[Matrix, ...]:
        """Return the matrices in a parameter, `gate_up` or `down`."""
        return self.matrices[-1:] if parameter == self.down else self.matrices[:-1]


@dataclass(frozen=True, slots=True)
class Latent:
    """The matrices of a layer's latent attention, each with one per head stacked; see `latent`."""

    expand: str  # the parameter [heads * (plain + values), rank]
    keys: Matrix  # [heads * rank, plain]
    values: Matrix  # [heads * values, rank]

    @property
    def heads(self) -> int:
        return self.keys.rows // self.values.columns

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the parameter."""
        return self.heads * self.keys.columns + self.values.rows, self.values.columns


@dataclass(frozen=True, slots=True)
class TracedSpec:
    """Parameters and attention of a model; independent of the dtype."""

    # name -> shape, of parameters outside the matrices
    parameters: dict[str, tuple[int, ...]] = field(hash=False)
    matrices: tuple[Matrix, ...]  # in the order of their use, without the head
    head: Matrix | None  # "head"; None: tied to the embedding
    embedding: str  # name of the embedding's parameter
    tables: tuple[Matrix, ...]  # other embeddings that are only looked up
    vocab_size: int
    hidden_size: int  # width of the head's input
    carried_width: int  # numbers per row that stages pass on, at most
    aliases: dict[str, str] = field(hash=False)  # another name of a parameter -> its name
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    windows: tuple[int | None, ...]
    softcap: float | None = None
    kv_parts: int = 2  # see `ModelConfig`
    sinks: tuple[str, ...] = ()  # names of parameters, by layer; empty: no sinks
    states: tuple[tuple[int, ...], ...] = ()  # shapes of a request's recurrent states
    moe_layers: tuple[Mixed, ...] = ()
    latents: tuple[Latent, ...] = ()  # of layers with latent attention
    wide: tuple[str, ...] = ()  # `parameters` that stay in float32
    unread: frozenset[str] = frozenset()  # tensors that text does not need, for example for images
    # RoPE changes its frequencies for longer prompts, but cached keys keep the old ones; None: no limit.
    most_tokens: int | None = None
    context_tokens: int = 0  # by the configuration
    bos_token_ids: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] = ()

    @property
    def inner_matrices(self) -> tuple[Matrix, ...]:
        """Matrices of layers, their heads and experts, without the output head."""
        of_heads = (matrix for latent in self.latents for matrix in (latent.keys, latent.values))
        return (*self.matrices, *of_heads, *(fused for moe in self.moe_layers for fused in moe.matrices))

    @property
    def all_matrices(self) -> tuple[Matrix, ...]:
        """Matrices of layers, their heads and experts, and the output head."""
        return self.inner_matrices if self.head is None else (*self.inner_matrices, self.head)


NOTHING = TracedSpec({}, (), None, "", (), 0, 0, 0, {}, 0, 0, 0, 1.0, ())


def stand_in(name: str, schema: str, fake: Callable[..., Tensor]) -> Any:
    """Register an operator that stands for a function in graphs; stages and executor compute it."""
    torch.library.define(f"neo_desktop::{name}", schema)
    torch.library.register_fake(f"neo_desktop::{name}", fake)
    return getattr(torch.ops.neo_desktop, name)


Change = tuple[Any, str, Any]
"""An object, the name of an attribute, and the attribute's value within a context."""


@contextmanager
def changed(*changes: Change) -> Iterator[None]:
    """Change attributes within the context."""
    with ExitStack() as stack:
        for change in changes:
            stack.enter_context(patch.object(*change))
        yield


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the advice of transformers."""
    from transformers.utils import logging  # noqa: PLC0415 - large, and rarely needed

    before = logging.get_verbosity()
    logging.set_verbosity(ERROR)
    try:
        yield
    finally:
        logging.set_verbosity(before)
