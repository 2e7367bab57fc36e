"""Records the attention and linear layers of a `transformers` model while its code runs."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from threading import RLock
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from neo_desktop.models.limits import HEAD_UNIT
from neo_desktop.models.traced.heads import HeadShape, Packing
from neo_desktop.models.traced.latent import keeps_latent, queries, results
from neo_desktop.models.traced.sizes import stand_in

NAME = "neo_desktop"  # name of the attention in the model's configuration
EXPERTS = "batched_mm"  # name of the experts' implementation that is replaced
_MATMULS = (torch.matmul, Tensor.matmul, Tensor.__matmul__)
TRACING = RLock()  # one thread at a time: patched functions are global
HARMLESS = ("position_ids", "cache_position")  # tensor arguments of attention that it does not need


class CannotCutError(Exception):
    """A feature of a model that stages do not support."""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """Parameters of one layer's attention."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None  # tokens, the current one included
    sinks: Tensor | None  # [heads]
    softcap: float | None  # scores s become softcap * tanh(s / softcap)
    key: Tensor  # [1, kv_heads, rows, head_dim]
    values_in_keys: bool  # values are the first numbers of keys


@dataclass(slots=True)
class Product:
    """A call of a linear layer."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None


@dataclass(slots=True)
class Calls:
    """Recorded calls, in order; `shape`: of the heads in the KV cache, None: of the first layer."""

    shape: HeadShape | None = None
    attention: list[AttentionCall] = field(default_factory=list)
    products: list[Product] = field(default_factory=list)
    experts: list[tuple[nn.Module, int]] = field(default_factory=list)  # module, experts per token
    latents: list[nn.Module] = field(default_factory=list)  # latent attention
    states: list[tuple[int, ...]] = field(default_factory=list)  # shapes, see `recurrences`
    looked_up: list[Tensor] = field(default_factory=list)  # weights of embeddings
    masks: list[tuple[Tensor, int | None]] = field(default_factory=list)  # with windows
    read: set[int] = field(default_factory=set)  # ids of the model's parameters and buffers


# A layer's attention: q [1, heads, rows, head_dim], k and v [1, kv_heads, rows, head_dim]
# -> [1, rows, heads, head_dim].
attention = stand_in(
    "attention",
    "(Tensor q, Tensor k, Tensor v, int layer) -> Tensor",
    lambda q, k, v, layer: q.new_empty(q.shape[0], q.shape[2], q.shape[1], q.shape[3]),
)
# A mixture of experts, for x [rows, hidden], as the result. Each row has ids of experts, and their weights,
# [rows, per token]. The matrices are gate_up [experts, 2 * intermediate, hidden], or without gates
# [experts, intermediate, hidden], and down [experts, hidden, intermediate].
experts = stand_in(
    "experts",
    "(Tensor x, Tensor ids, Tensor weights, Tensor gate_up, Tensor down) -> Tensor",
    lambda x, ids, weights, gate_up, down: torch.empty_like(x),
)


class Catching(TorchFunctionMode):
    """Records calls of linear layers and embeddings, and the tensors of the model that are read.

    A matmul with a transposed parameter, as in Falcon, becomes a linear layer. A model without attention gets
    one after its embeddings.
    """

    def __init__(self, calls: Calls, model: nn.Module) -> None:
        super().__init__()
        self._calls = calls
        self._of_model = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        self._transposed: list[tuple[Tensor, nn.Parameter]] = []
        self._attends = has_attention(model)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if func is Tensor.__getitem__ and any(args[0] is mask for mask, _ in self._calls.masks):
            return args[0]  # masks have one number here
        if func in _MATMULS and not given:
            weight = next((weight for transposed, weight in self._transposed if transposed is args[1]), None)
            if weight is not None:
                func, args = functional.linear, (args[0], weight)
        if func is functional.linear:
            bias = given.get("bias", args[2] if len(args) > 2 else None)
            self._calls.products.append(Product(args[0], args[1], bias))
        if func is functional.embedding:
            self._calls.looked_up.append(args[1] if len(args) > 1 else given["weight"])
        result = func(*args, **given)
        if isinstance(result, (Tensor, list, tuple)):  # other results are sizes
            self._calls.read |= self._of_model.intersection(map(id, tree_leaves((args, given))))
        if getattr(func, "__self__", None) is Tensor.T and isinstance(args[0], nn.Parameter):
            self._transposed.append((result, args[0]))
        if func is functional.embedding and not self._attends and not self._calls.attention:
            return _with_attention(self._calls, result)
        return result


def has_attention(model: nn.Module) -> bool:
    """Return True if a module is named so."""
    return any("Attention" in type(module).__name__ for module in model.modules())


def _with_attention(calls: Calls, x: Tensor) -> Tensor:
    """Add an attention without effect, because stages begin and end at attentions; x: [1, rows, hidden]."""
    head = x[:, None, :, :HEAD_UNIT]
    return x + 0.0 * attend(calls, head, head, head)[:, 0, :, :1]


def attend(
    calls: Calls,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    window: int | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    values_in_keys: bool = False,
) -> Tensor:
    """Record a layer's attention; the arguments are those of torch's function.

    Returns:
        [1, heads, rows, head_dim], as torch's function.

    Raise CannotCutError if the kernels do not support it.
    """
    if attn_mask is not None:
        windows = [mask_window for mask, mask_window in calls.masks if mask is attn_mask]
        if not windows:
            raise CannotCutError("it adds numbers to the scores of attention, as ALiBi does")
        window = windows[0]  # torch's attention obeys the mask alone
    if query.shape[2] != key.shape[2]:
        raise CannotCutError("it attends to another sequence (cross-attention)")
    heads, kv_heads, head_dim = query.shape[1], key.shape[1], key.shape[3]
    width = value.shape[3]
    if values_in_keys:  # the results' other numbers are dropped
        value = key
    elif width < head_dim:  # padding with zeros appends zeros to the results
        value = torch.cat((value, torch.zeros_like(key[..., width:])), dim=-1)
    if value.shape[3] != head_dim or value.shape[1] != kv_heads:
        raise CannotCutError("its keys and values are of different sizes")
    if heads % kv_heads:
        raise CannotCutError(f"{heads} heads cannot share {kv_heads} key-value heads")
    scale = head_dim**-0.5 if scale is None else float(scale)
    if calls.attention and scale != calls.attention[0].scale:  # the kernels have one for all layers
        query = query * (scale / calls.attention[0].scale)
        scale = calls.attention[0].scale
    calls.attention.append(
        AttentionCall(heads, kv_heads, head_dim, scale, window, sinks, softcap, key, values_in_keys)
    )
    packing = None if calls.shape is None else Packing(heads, kv_heads, head_dim, calls.shape)
    if packing is None or packing.is_idle:
        out: Tensor = attention(query, key, value, len(calls.attention) - 1)
    else:
        keys = packing.keys(key)
        packed = packing.queries(query), keys, keys if values_in_keys else packing.keys(value)
        out = packing.results(attention(*packed, len(calls.attention) - 1))
    return out.transpose(1, 2)[..., :width]


def first_matrix(module: Any) -> Tensor:
    """Return the experts' gates and ups, or their ups."""
    matrix: Tensor = module.gate_up_proj if module.has_gate else module.up_proj
    return matrix


def mix(calls: Calls, module: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Record a mixture of experts; the arguments are those of transformers.

    Raise CannotCutError if its matrices are neither gate, up and down nor up and down.
    """
    is_usual = module.is_concatenated or not module.has_gate
    if not is_usual or module.is_transposed or module.has_bias or module.has_post_expert_norm:
        raise CannotCutError("its experts are of an unsupported kind")
    calls.experts.append((module, ids.shape[-1]))
    out: Tensor = experts(x, ids, weights, first_matrix(module), module.down_proj)
    return out


@contextmanager
def intercepted(calls: Calls) -> Iterator[None]:
    """Record attention named `NAME`, torch's attention, and experts named `EXPERTS`, within the context."""
    from transformers import masking_utils  # noqa: PLC0415 - large, and rarely needed
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS  # noqa: PLC0415 - as above
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel  # noqa: PLC0415

    def attention_of_layer(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        scaling: float | None = None,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        is_causal: bool | None = None,
        **rest: object,
    ) -> tuple[Tensor, None]:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        if not causal:
            raise CannotCutError("its attention is not causal")
        for name, value_ in rest.items():
            if isinstance(value_, Tensor) and name not in HARMLESS:
                raise CannotCutError(f"its attention takes {name}, which this engine does not support")
        is_latent = keeps_latent(module)
        if is_latent:
            calls.latents.append(module)
            query = queries(module, query)
        out = attend(
            calls,
            query,
            key,
            value,
            attention_mask,
            scale=scaling,
            window=sliding_window,
            sinks=s_aux,
            softcap=softcap,
            values_in_keys=is_latent,
        )
        if is_latent:
            out = results(module, out)
        return out.transpose(1, 2), None

    def no_mask(*_: object, local_size: int | None = None, device: Any = None, **__: object) -> Tensor:
        calls.masks.append((torch.zeros(1, 1, 1, 1, device=device), local_size))
        return calls.masks[-1][0]

    def no_chunks(*_: object) -> None:
        raise CannotCutError("its attention hides all tokens before a chunk")

    masks: Any = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS._global_mapping
    attentions: Any = ALL_ATTENTION_FUNCTIONS._global_mapping
    mixtures: Any = ALL_EXPERTS_FUNCTIONS._global_mapping
    with (
        patch.dict(attentions, {NAME: attention_of_layer}),
        patch.dict(masks, dict.fromkeys((NAME, "sdpa"), no_mask)),
        patch.dict(mixtures, {EXPERTS: partial(mix, calls)}),
        patch.object(functional, "scaled_dot_product_attention", partial(attend, calls)),
        patch.object(masking_utils, "chunked_causal_mask_function", no_chunks),
        # These would read values of positions and tokens.
        patch.object(masking_utils, "find_packed_sequence_indices", lambda *_: None),
        patch.object(PreTrainedModel, "warn_if_padding_and_no_attention_mask", lambda *_: None),
    ):
        yield
