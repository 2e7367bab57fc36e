"""The sizes of a `transformers` model, from a run without numbers."""

import inspect
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from neo_desktop.models.families import is_language_model
from neo_desktop.models.json_file import INSTALL_TRANSFORMERS, ModelError
from neo_desktop.models.limits import MAX_CONTEXT_TOKENS
from neo_desktop.models.matrices import Matrix
from neo_desktop.models.traced import assistant, deepstack, predicting
from neo_desktop.models.traced.capture import (
    EXPERTS,
    NAME,
    TRACING,
    Calls,
    CannotCutError,
    Catching,
    has_attention,
    intercepted,
)
from neo_desktop.models.traced.conversions import Conversions
from neo_desktop.models.traced.experts import mixed
from neo_desktop.models.traced.heads import HeadShape, common_shape
from neo_desktop.models.traced.latent import latent_sizes, latents_kept
from neo_desktop.models.traced.recurrences import recurrences_recorded
from neo_desktop.models.traced.refusals import cannot_cut, missing_part, not_made
from neo_desktop.models.traced.sizes import (
    Change,
    Source,
    TracedSpec,
    changed,
    quiet,
)

# Configuration attributes with the number of positions; most classes map their own name to the first.
_CONTEXT = ("max_position_embeddings", "max_seq_len", "max_target_positions")
_UNKNOWN_CONTEXT = 2048
_WITHOUT_ATTENTION = 2**20  # recurrent states have no positions
LONG = "longrope"
_CHANGING = ("dynamic", LONG)  # RoPE types with frequencies that depend on a prompt's length
_DENSE = ("moe", "mlp")  # types of Nemotron-H's layers that only transform each token
_DRAFTING = {"layer": predicting, "assistant": assistant}
ROWS = 5  # of the run; differs from every size of a model


def empty_model(source: Source, dtype: torch.dtype) -> Any:
    """Return the described model, without numbers.

    Raise ModelError if transformers is not installed, or does not know the model.
    """
    try:
        from transformers import AutoModelForCausalLM, AutoModelForImageTextToText  # noqa: PLC0415 - as above
    except ImportError:
        raise ModelError(
            f"{source.named} describes a model that only transformers knows. "
            f"Install its code ({INSTALL_TRANSFORMERS}), or choose another model."
        ) from None
    config: Any = None
    with quiet():
        try:
            config = source.config()
            if source.predicts:
                config = _DRAFTING[source.predicts].config_of(config)
            with torch.device("meta"), intercepted(Calls()):  # registers the attention's name
                make: Any = AutoModelForCausalLM
                known: Any = AutoModelForImageTextToText._model_mapping.get(type(config), None)
                if known is not None and known.__name__ in (config.architectures or ()):
                    make = AutoModelForImageTextToText
                others = {"experts_implementation": EXPERTS, "dtype": dtype}
                try:
                    model = make.from_config(config, attn_implementation=NAME, **others)
                except KeyError:  # the model has its own list of attentions
                    model = make.from_config(config, attn_implementation="sdpa", **others)
        except Exception as error:  # any exception: the code is not this project's
            raise not_made(source, config, error) from None
    names = config.architectures
    if not is_language_model(names) and type(model).__name__ not in names:
        raise ModelError(
            f"{source.named} describes {str(names[0])[:50]!r}, which has another head than a language "
            "model: choose another model."
        )
    for end, groups, heads in source.transposed:
        for name, module in model.named_modules():
            if name.endswith(end):
                module.register_forward_pre_hook(partial(_transpose, groups, heads))
    for name in source.untied:
        path, _, own = name.rpartition(".")
        module = model.get_submodule(path)
        module._parameters[own] = nn.Parameter(torch.empty_like(module._parameters[own]), requires_grad=False)
    deepstack.add_to(model)
    if source.predicts:
        try:
            _DRAFTING[source.predicts].add_to(model)
        except Exception as error:  # as above
            raise not_made(source, config, error) from None
    return model.eval()


def _transpose(groups: int, heads: int, _: nn.Module, given: tuple[Tensor, ...]) -> Tensor:
    """Sort the input of a linear layer; see `Source.transposed`."""
    (x,) = given
    return torch.unflatten(x, -1, (groups, heads, -1)).transpose(-3, -2).flatten(-3)


def run(model: Any, token_ids: Tensor, positions: Tensor, calls: Calls) -> Tensor:
    """Run a model and record its calls; return its scores [1, rows, vocab].

    Raise CannotCutError if stages do not support a call.
    """
    given = {"input_ids": token_ids, "position_ids": positions, "use_cache": False, "return_dict": True}
    if "position_ids" not in inspect.signature(model.forward).parameters:
        if has_attention(model):
            raise CannotCutError("its code has no parameter for positions")
        del given["position_ids"]
    with (
        quiet(),
        intercepted(calls),
        changed(*recurrences_recorded(calls, model), *latents_kept(model), *_steady(model)),
        Catching(calls, model),
    ):
        logits: Tensor = model(**given).logits
    return logits


def spec(source: Source) -> TracedSpec:
    """Return the sizes of a model.

    Raise ModelError if transformers does not know it, or it cannot be cut into stages.
    """
    return examined(source, source.modified_ns)[0]


def conversions_of(source: Source) -> Conversions:
    """Return the conversions from a model's checkpoint to its parameters; raises as `spec` does."""
    return examined(source, source.modified_ns)[1]


def _steady(model: nn.Module) -> Iterator[Change]:
    """Fix RoPE's frequencies, which some types change for long prompts; see `TracedSpec.most_tokens`."""
    for module in model.modules():
        if hasattr(module, "rope_type"):
            yield module, "rope_type", _without_change(module.rope_type)


def _without_change(rope_type: Any) -> Any:
    if isinstance(rope_type, dict):
        return {kind: _without_change(each) for kind, each in rope_type.items()}
    return "default" if rope_type in _CHANGING else rope_type


def _most_tokens(config: Any, *, is_long: bool) -> int | None:
    """Return the most tokens with unchanged RoPE frequencies; None: no limit."""
    text = config.get_text_config()
    parameters = getattr(text, "rope_parameters", None) or {}
    sections = [parameters, *(each for each in parameters.values() if isinstance(each, dict))]
    limits = [
        int(section.get("original_max_position_embeddings") or text.max_position_embeddings)
        for section in sections
        if section.get("rope_type") in _CHANGING and not (is_long and section.get("rope_type") == LONG)
    ]
    return min(limits, default=None)


@lru_cache(maxsize=32)
def examined(source: Source, _modified_ns: int) -> tuple[TracedSpec, Conversions]:
    """Return sizes and conversions from a run without numbers; cached for recent models."""
    with TRACING:
        return _run_without_numbers(source)


def _run_without_numbers(source: Source) -> tuple[TracedSpec, Conversions]:
    model, calls = empty_model(source, torch.float32), Calls()
    ids = torch.zeros(1, ROWS, dtype=torch.int64, device="meta")
    try:
        if (part := missing_part(model)) is not None:
            raise CannotCutError(part)
        with torch.no_grad():
            logits = run(model, ids, ids, calls)
        sizes = {(each.kv_heads, each.head_dim) for each in calls.attention}
        shape = common_shape(sizes) if sizes else None
        if shape is not None and sizes != {shape}:
            _check_groups(calls, shape)
            calls = Calls(shape=shape)
            with torch.no_grad():
                logits = run(model, ids, ids, calls)
        found, conversions = _spec(model, calls, logits, source), Conversions(model)
    except Exception as error:  # any exception: the code is not this project's
        raise cannot_cut(source, model, error) from None
    with quiet():
        return replace(found, **_described(source, source.config())), conversions


def is_wide(model: Any, name: str) -> bool:
    """Return True if transformers keeps a parameter or buffer in float32 with any dtype."""
    return any(part in name for part in getattr(model, "_keep_in_fp32_modules_strict", None) or ())


def _spec(model: Any, calls: Calls, logits: Tensor, source: Source) -> TracedSpec:
    names: dict[int, str] = {}
    aliases: dict[str, str] = {}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, parameter in parameters.items():
        first = names.setdefault(id(parameter), name)
        if first != name:
            aliases[name] = first
    stored = model.state_dict().keys()
    buffers = {
        name: value
        for name, value in model.named_buffers(remove_duplicate=False)
        if name in stored and value.is_floating_point()
    }
    tensors = {name: parameters[name] for name in names.values()} | buffers
    first = _same_attention(model, calls)
    sinks = [each.sinks for each in calls.attention if each.sinks is not None]
    if any(id(each) not in names or each.shape != (first.heads,) for each in sinks):
        raise CannotCutError("its attention sinks are not weights with one number per head")
    read = {*calls.read, *map(id, sinks)}
    shapes = {name: tuple(value.shape) for name, value in tensors.items() if id(value) in read}
    unread = frozenset(tensors.keys() - shapes.keys())
    products = [each for each in calls.products if id(each.weight) in names]
    tables = calls.looked_up
    if not products or not tables or id(tables[0]) not in names:
        raise CannotCutError("it has no token embedding, or no linear layers")
    last = products[-1]
    if last.weight.shape[0] != logits.shape[-1]:
        raise CannotCutError("it does not end with a head")
    looked_up = {id(weight) for weight in tables}
    times = Counter(id(each.weight) for each in products)
    groups: dict[tuple[int, bool], list[Any]] = {}
    for each in products[:-1]:
        if times[id(each.weight)] == 1 and id(each.weight) not in looked_up:
            groups.setdefault((id(each.x), each.bias is None), []).append(each)
    matrices = tuple(_matrix(group, names) for group in groups.values())
    is_tied = id(last.weight) in looked_up
    if times[id(last.weight)] > 1:
        raise CannotCutError("its head has several uses")
    head = None if is_tied else replace(_matrix([last], names), name="head")
    moe_layers = tuple(mixed(*call, names, index) for index, call in enumerate(calls.experts))
    latents = tuple(latent_sizes(module, names, index) for index, module in enumerate(calls.latents))
    for name in (
        *(name for moe in moe_layers for name in (moe.gate_up, moe.down)),
        *(latent.expand for latent in latents),
    ):
        del shapes[name]
    others = looked_up - times.keys() - {id(tables[0])}
    own_tables = tuple(_table(names[number], shapes) for number in names if number in others)
    for fused in (*matrices, *own_tables, *(() if head is None else (head,))):
        for name in (*fused.weights, *fused.biases):
            del shapes[name]
    return TracedSpec(
        parameters=shapes,
        matrices=matrices,
        head=head,
        embedding=names[id(tables[0])],
        tables=own_tables,
        carried_width=_carried_width(
            calls, last.weight.shape[1], has_gates=bool(calls.states or source.predicts)
        )
        + deepstack.width_of(model.config),
        vocab_size=logits.shape[-1],
        hidden_size=last.weight.shape[1],
        aliases=aliases,
        heads=first.heads,
        kv_heads=(calls.shape or first).kv_heads,
        head_dim=(calls.shape or first).head_dim,
        scale=first.scale,
        windows=tuple(call.window for call in calls.attention),
        softcap=first.softcap,
        kv_parts=1 if all(call.values_in_keys for call in calls.attention) else 2,
        sinks=tuple(names[id(each)] for each in sinks),
        states=tuple(calls.states),
        moe_layers=moe_layers,
        latents=latents,
        wide=tuple(name for name in shapes if is_wide(model, name)),
        unread=unread,
        most_tokens=_most_tokens(model.config, is_long=source.is_long),
    )


def _carried_width(calls: Calls, hidden_size: int, *, has_gates: bool) -> int:
    """Return the most numbers per row that stages pass on.

    These are hidden states twice, rows of other embeddings, and keys and values that several layers read.
    Hybrids and their layers of multi-token prediction also pass on gates of attention's output.
    """
    embeddings = [weight.shape[1] for weight in calls.looked_up]
    keys = [id(each.key) for each in calls.attention]
    width = 2 * max(hidden_size, embeddings[0]) + sum(embeddings[1:])
    width += calls.attention[0].heads * calls.attention[0].head_dim if has_gates else 0
    cached = calls.shape or calls.attention[0]
    return width + sum(2 * cached.kv_heads * cached.head_dim for key in {*keys} if keys.count(key) > 1)


def _matrix(products: list[Any], names: dict[int, str]) -> Matrix:
    """Return the matrix of linear layers with one input, named after the first."""
    weights = tuple(names[id(each.weight)] for each in products)
    return Matrix(
        weights[0].removesuffix(".weight"),
        weights,
        tuple(each.weight.shape[0] for each in products),
        products[0].weight.shape[1],
        tuple(names[id(each.bias)] for each in products if each.bias is not None),
    )


def _table(name: str, shapes: dict[str, tuple[int, ...]]) -> Matrix:
    """Return the matrix of an embedding beside the tokens' one."""
    rows, columns = shapes[name]
    return Matrix(name.removesuffix(".weight"), (name,), (rows,), columns, is_table=True)


def _same_attention(model: Any, calls: Calls) -> Any:
    """Return the first layer's attention, if the other layers differ only in windows."""
    text = model.config.get_text_config()
    others = [kind for kind in getattr(text, "layer_types", None) or () if kind in _DENSE]
    layers = text.num_hidden_layers - len(others)
    if not calls.attention:
        raise CannotCutError("it has no attention layers")
    if len(calls.attention) < layers and not calls.states:
        raise CannotCutError(
            f"{layers - len(calls.attention)} of its {layers} layers have no attention that is supported here"
        )
    if len(calls.attention) > layers:
        raise CannotCutError(f"its {layers} layers attend {len(calls.attention)} times")
    first = calls.attention[0]
    for call in calls.attention:
        if call.softcap != first.softcap:
            raise CannotCutError("its layers cap scores of attention differently")
        if (call.sinks is None) != (first.sinks is None):
            raise CannotCutError("only some of its layers have attention sinks")
    return first


def _check_groups(calls: Calls, shape: HeadShape) -> None:
    """Raise CannotCutError if layers cannot have heads of one shape."""
    if len({call.heads for call in calls.attention}) > 1:
        raise CannotCutError("its layers have different numbers of query heads")
    heads = calls.attention[0].heads
    if heads % shape.kv_heads:
        raise CannotCutError(f"{heads} heads cannot share {shape.kv_heads} key-value heads")


def _described(source: Source, config: Any) -> dict[str, Any]:
    """Return the fields of `TracedSpec` that the configuration determines, not the code.

    Raise ModelError if the context is out of range.
    """
    text = config.get_text_config(decoder=True)
    contexts = (getattr(text, name, None) for name in _CONTEXT)
    default = _UNKNOWN_CONTEXT if hasattr(text, "num_attention_heads") else _WITHOUT_ATTENTION
    context = next((each for each in contexts if type(each) is int), default)
    if not 1 <= context <= MAX_CONTEXT_TOKENS:
        raise ModelError(f"{source.named} has a context of {context} tokens: correct the file.")

    def ids(name: str) -> tuple[int, ...]:
        for section in (config, text):
            value = getattr(section, name, None)
            token_ids = value if isinstance(value, list) else [value]
            if all(type(token) is int and 0 <= token < text.vocab_size for token in token_ids):
                return tuple(token_ids)
        return ()

    ends = ids("eos_token_id")
    return {"context_tokens": context, "bos_token_ids": ids("bos_token_id")[:1], "eos_token_ids": ends}
