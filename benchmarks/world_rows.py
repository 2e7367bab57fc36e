"""Rows of `world.json`, and what one token reads on each as its program places the model.

A row's `how` places the model as llama.cpp's options do:

    card             all weights and KV on the card
    ngl N            N layers on the card; the CPU computes the others, and attends to their KV
    n-cpu-moe N      the experts of N layers are the CPU's; cpu-moe: of all layers
    fit              as many layers, or layers' experts, as the card has room for, as `--fit on` chooses
    cpu              all on the CPU

`context` counts the tokens that are attended to (`assumed`: none is published, and the chat is taken as
short), `set` those that KV has room for. `kv` is bits per number of KV, `gb` the size of the file, and `skip`
the reason why a row cannot be modelled. Trust: A, rig and options are named; B, some are missing; C, a claim.
"""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from neo_desktop.app.simulate.traced_shapes import TRACED_SHAPES
from neo_desktop.engine.simulation.machine import GIB, GpuPreset, HostPreset
from neo_desktop.engine.simulation.presets import get_gpu, get_host
from neo_desktop.models.config import ModelConfig
from neo_desktop.models.shapes import SHAPES

FILE = Path(__file__).with_name("world.json")

# Bits per weight of llama.cpp's mixtures: most matrices, down projections, and the head. Half of the down
# projections of a Q4_K_M file are Q6_K. Files of other mixtures give their size in `gb`.
BITS: dict[str, tuple[float, float, float]] = {
    "F16": (16, 16, 16),
    "Q8_0": (8.5, 8.5, 8.5),
    "Q6_K": (6.5625, 6.5625, 6.5625),
    "Q4_K_XL": (4.5, 5.53, 6.5625),
    "Q4_K_M": (4.5, 5.53, 6.5625),
    "Q4_K_S": (4.5, 4.7, 6.5625),
    "Q4_0": (4.5, 4.5, 6.5625),
    "IQ4_XS": (4.25, 4.7, 6.5625),
    "MXFP4": (8.5, 8.5, 8.5),  # all but the experts
    "MXFP4, Q4_K_M": (4.5, 5.53, 6.5625),
    "Q2_K": (2.625, 3.4375, 6.5625),
    **dict.fromkeys(("IQ3_S", "IQ3_XXS", "IQ2_XXS", "Q2_K_XL"), (3.0, 3.0, 5.5)),
}
EXPERT_BITS = {"MXFP4": 4.25, "MXFP4, Q4_K_M": 4.25}
CONTEXT_BYTES = 1.2e9  # of the driver's context and the compute buffers
USUAL_MARGIN_GIB = 1.0  # what `--fit on` leaves free


@dataclass(frozen=True)
class Row:
    """One published measurement."""

    values: dict[str, Any]
    hosts: dict[str, Any]
    sources: dict[str, str]

    def __getitem__(self, name: str) -> Any:
        return self.values.get(name)

    @property
    def title(self) -> str:
        """The row in a few words."""
        parts = (self["card"], self["model"], self["quant"], self["context"], self["how"])
        return " ".join(str(part) for part in parts if part is not None)

    @property
    def source(self) -> str:
        """The address, or the name if the address was not recorded."""
        return self.sources[self["source"]]

    @cached_property
    def gpu(self) -> GpuPreset | None:
        return None if self["card"] is None else get_gpu(self["card"])

    @cached_property
    def host(self) -> HostPreset:
        """The published host, or the one that usually comes with the card."""
        known = self.hosts.get(self["host"])
        if known is None:
            assert self.gpu is not None
            return get_host(self.gpu.host)
        like = get_host(f"{known['kind']}-desktop")
        return HostPreset(
            known["cpu"],
            64 * GIB,
            known["gb_per_s"] * 1e9,
            known["cores"],
            like.core_bytes_per_s,
            like.core_flops,
        )

    @property
    def host_kind(self) -> str:
        known = self.hosts.get(self["host"])
        return str(known["kind"]) if known else self.host.name.split("-")[0]

    @property
    def host_is_known(self) -> bool:
        """False if the kind of host memory does not follow from what is published."""
        known = self.hosts.get(self["host"])
        return known is not None and "too" not in known.get("assumed", "")

    @property
    def config(self) -> ModelConfig:
        return SHAPES[self["model"]] if self["model"] in SHAPES else TRACED_SHAPES[self["model"]]


def load(file: Path = FILE) -> list[Row]:
    world = json.loads(file.read_text())
    return [Row(values, world["hosts"], world["sources"]) for values in world["rows"]]


class Reads(NamedTuple):
    """Bytes that one token reads, and layers that take time in addition."""

    card: float = 0.0  # weights and states
    card_kv: float = 0.0
    card_layers: float = 0.0
    card_mixtures: float = 0.0  # layers with experts
    card_recurrent: float = 0.0  # layers with a state matrix: DeltaNet, Mamba-2
    host: float = 0.0  # weights of the CPU but experts
    host_experts: float = 0.0
    host_kv: float = 0.0
    host_layers: float = 0.0  # layers with work for the CPU


class _Sizes(NamedTuple):
    """Bytes of a model's weights: stored, and read by one token."""

    layers: float
    experts: float
    experts_read: float
    head: float


def _sizes(row: Row) -> _Sizes:
    config = row.config
    most, down, head_bits = BITS[row["quant"]]
    of_experts = EXPERT_BITS.get(row["quant"])
    layers = experts = 0.0
    for name, matrix in config.each_matrix():
        kind = name.split(".")[-1]
        bits = down if "down" in kind else most
        if matrix.experts:
            experts += matrix.rows * matrix.columns * (of_experts or bits) / 8
        elif kind != "head":
            layers += matrix.rows * matrix.columns * bits / 8
    table = config.vocab_size * config.hidden_size / 8
    head, embedding = table * head_bits, 0.0 if config.tie_word_embeddings else table * most
    if row["gb"]:
        scale = (row["gb"] * 1e9 - head - embedding) / (layers + experts)
        layers, experts = scale * layers, scale * experts
    share = 0.0 if config.experts is None else config.experts.per_token / config.experts.count
    return _Sizes(layers, experts, experts * share, head)


def reads(row: Row) -> Reads:
    """Return what one token reads on this row's machine."""
    config, sizes = row.config, _sizes(row)
    depth = config.num_layers_in_all
    mixtures = 0 if config.experts is None else len(config.experts.layers)
    kv_token = config.kv_bytes_per_token(config.dtype) * (row["kv"] or 16) / 16
    kv = kv_token * config.attended_tokens(row["context"])
    states = 2 * config.state_bytes
    room = 0.0
    if row.gpu is not None:
        margin = USUAL_MARGIN_GIB if row["margin_gib"] is None else row["margin_gib"]
        room = row.gpu.memory_bytes - margin * GIB - CONTEXT_BYTES - sizes.head
    allocated = kv_token * config.attended_tokens(max(row["set"] or 0, row["context"])) + states / 2
    on_card, experts_on_card = _placed(row["how"], sizes, depth, mixtures, allocated, room)
    off = 1 - on_card
    experts_off = 1 - experts_on_card
    return Reads(
        card=on_card * (sizes.layers + states)
        + experts_on_card * sizes.experts_read
        + (sizes.head if row["how"] != "cpu" else 0.0),
        card_kv=on_card * kv,
        card_layers=on_card * depth,
        card_mixtures=experts_on_card * mixtures,
        card_recurrent=on_card * sum(len(shape) == 3 for shape in config.state_shapes),
        host=off * (sizes.layers + states) + (sizes.head if row["how"] == "cpu" else 0.0),
        host_experts=experts_off * sizes.experts_read,
        host_kv=off * kv,
        host_layers=max(off * depth, experts_off * mixtures),
    )


def _placed(
    how: str, sizes: _Sizes, depth: int, mixtures: int, allocated: float, room: float
) -> tuple[float, float]:
    """Return the shares of the layers, and of the layers' experts, that are on the card."""
    name, _, number = how.partition(" ")
    fixed = {"card": (1.0, 1.0), "cpu": (0.0, 0.0), "cpu-moe": (1.0, 0.0)}
    if name in fixed:
        return fixed[name]
    if name == "ngl":
        return int(number) / depth, int(number) / depth
    if name == "n-cpu-moe":
        return 1.0, 1 - int(number) / mixtures
    if name != "fit":
        raise ValueError(f"{how!r} is no placement")
    if sizes.experts:
        left = max(room - sizes.layers - allocated, 0.0)
        return 1.0, min(int(mixtures * left / sizes.experts), mixtures) / mixtures
    layers = min(int(depth * room / (sizes.layers + allocated)), depth)
    return layers / depth, layers / depth
