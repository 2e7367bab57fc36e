"""The code of a `transformers` model as a graph of operators; only attention mixes tokens."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export.graph_signature import InputKind
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from neo_desktop.models.traced.capture import TRACING, Calls, CannotCutError
from neo_desktop.models.traced.heads import HeadShape
from neo_desktop.models.traced.recurrences import ROW_DIMS
from neo_desktop.models.traced.refusals import cannot_cut
from neo_desktop.models.traced.rows import RESHAPES, check_rows, is_plain, is_pointwise, name_of
from neo_desktop.models.traced.sizes import Source, TracedSpec
from neo_desktop.models.traced.spec import LONG, empty_model, is_wide, run

ROWS = 7  # rows of the example inputs; the graph works for any number

_FRESH = frozenset(("zeros_like", "ones_like", "full_like", "empty_like"))


@dataclass(frozen=True, slots=True)
class Exported:
    """A graph, and the meaning of its inputs.

    Args:
        parameters: input -> name of the parameter.
        buffers: input -> its value.
    """

    graph: fx.Graph
    parameters: dict[fx.Node, str]
    buffers: dict[fx.Node, Tensor]
    token_ids: fx.Node
    positions: fx.Node


class _Scores(nn.Module):
    def __init__(self, model: Any, calls: Calls) -> None:
        super().__init__()
        self.model = model
        self._calls = calls

    def forward(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        return run(self.model, token_ids, positions, self._calls)


def exported(source: Source, dtype: torch.dtype, spec: TracedSpec) -> Exported:
    """Export a model that computes in a dtype.

    Raise ModelError if torch cannot export it, or its rows depend on one another.
    """
    aliases, shape = tuple(spec.aliases.items()), HeadShape(spec.kv_heads, spec.head_dim)
    with TRACING:
        return _exported(source, source.modified_ns, dtype, aliases, shape)


@lru_cache(maxsize=2)  # a model, and its layer of multi-token prediction; readers do not change them
def _exported(
    source: Source,
    _modified_ns: int,
    dtype: torch.dtype,
    aliases: tuple[tuple[str, str], ...],
    shape: HeadShape,
) -> Exported:
    model = empty_model(source, dtype)
    try:
        _fill_buffers(model, is_long=source.is_long)
        with FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True):
            known: dict[int, nn.Parameter] = {}
            for name, parameter in list(model.named_parameters(remove_duplicate=False)):
                if id(parameter) not in known:
                    numbers = torch.empty(parameter.shape, dtype=parameter.dtype)
                    known[id(parameter)] = nn.Parameter(numbers, requires_grad=False)
                path, _, own = name.rpartition(".")
                model.get_submodule(path)._parameters[own] = known[id(parameter)]
            ids = torch.zeros(1, ROWS, dtype=torch.int64)
            positions = torch.zeros(1, ROWS, dtype=torch.int64)
        shapes = ({1: torch.export.Dim.DYNAMIC}, {1: torch.export.Dim.DYNAMIC})
        with torch.no_grad():
            program = torch.export.export(
                _Scores(model, Calls(shape=shape)), (ids, positions), dynamic_shapes=shapes, strict=False
            )
        return _cleaned(program, dict(aliases))
    except Exception as error:  # any exception: the code is not this project's
        raise cannot_cut(source, model, error) from error


def _fill_buffers(model: Any, *, is_long: bool) -> None:
    """Compute the buffers that a model's constructor computes, for example RoPE's frequencies."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # noqa: PLC0415 - large

    computed: list[tuple[Any, str]] = []  # buffers that do not come from the checkpoint
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is None:
                continue
            fill = float("nan") if buffer.is_floating_point() else 0
            dtype = torch.float32 if is_wide(model, f"{path}.{name}") else buffer.dtype
            module._buffers[name] = torch.full(buffer.shape, fill, dtype=dtype)
            if name in module._non_persistent_buffers_set:
                computed.append((module, name))
    for module in model.modules():
        model._init_weights(module)
        if is_long and getattr(module, "rope_type", None) == LONG:
            beyond = module.config.rope_parameters["original_max_position_embeddings"] + 1
            of_long, _ = ROPE_INIT_FUNCTIONS[LONG](module.config, module.inv_freq.device, seq_len=beyond)
            module.inv_freq.copy_(of_long)
    for module, name in computed:
        if module._buffers[name].isnan().any():
            raise CannotCutError(f"the content of its buffer {name} is unknown")


def _cleaned(program: Any, aliases: dict[str, str]) -> Exported:
    graph: fx.Graph = program.graph
    parameters: dict[fx.Node, str] = {}
    buffers: dict[fx.Node, Tensor] = {}
    inputs = []
    specs = program.graph_signature.input_specs
    for node, spec in zip(list(graph.find_nodes(op="placeholder")), specs, strict=True):
        name = (spec.target or "").removeprefix("model.")
        if spec.kind is InputKind.PARAMETER or _is_stored(spec, node):
            parameters[node] = aliases.get(name, name)
        elif spec.kind in (InputKind.BUFFER, InputKind.CONSTANT_TENSOR):
            found = program.constants.get(spec.target)
            buffers[node] = program.state_dict[spec.target] if found is None else found
        else:
            inputs.append(node)
    for node in list(graph.nodes):
        if name_of(node) == "_assert_tensor_metadata" or "assert" in str(node.target):
            graph.erase_node(node)
    clean(graph)
    token_ids, positions = inputs
    _keep_rows_apart(graph, token_ids)
    check_rows(graph)
    return Exported(graph, parameters, buffers, token_ids, positions)


def _keep_rows_apart(graph: fx.Graph, token_ids: fx.Node) -> None:
    """Replace tensors [rows * heads, ...] by [rows, heads, ...], up to the next reshape."""
    count = token_ids.meta["val"].shape[1]
    joined: set[fx.Node] = set()
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.op != "call_function" or not isinstance(value, Tensor) or not value.dim():
            continue
        heads = _multiple(value.shape[0], count)
        if heads is None:
            continue
        name, inputs = name_of(node), [each for each in node.all_input_nodes if each in joined]
        if name in RESHAPES and not inputs and _is_row_major(node.args[0], count):
            with graph.inserting_before(node):
                rows = graph.call_function(torch.ops.aten.sym_size.int, (token_ids, 1))
                rows.meta["val"] = count
            node.args = (node.args[0], [rows, heads, *value.shape[1:]])
        elif not inputs or not ((is_plain(node) and name not in RESHAPES) or _is_over_last(node)):
            continue
        joined.add(node)
        fake: Any = value
        with fake.fake_mode:
            node.meta["val"] = value.reshape(count, heads, *value.shape[1:])


def _multiple(size: Any, count: Any) -> int | None:
    """Return k > 1 if a size is k times the number of rows; else None."""
    quotient = size.node.expr / count.node.expr if isinstance(size, torch.SymInt) else None
    return int(quotient) if quotient is not None and quotient.is_Integer and quotient > 1 else None


def _is_row_major(node: Any, count: Any) -> bool:
    """Return True if no dimension larger than 1 precedes the rows."""
    shape = node.meta["val"].shape
    return bool(next((size for size in shape if size != 1), None) == count)


def _is_over_last(node: fx.Node) -> bool:
    dims: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    return name_of(node) in ("mean", "sum", "softmax", "rms_norm") and (
        name_of(node) == "rms_norm" or dims in (-1, [-1], (-1,))
    )


def _is_stored(spec: Any, node: fx.Node) -> bool:
    """Return True if checkpoints contain a buffer; see `spec`."""
    return spec.kind is InputKind.BUFFER and spec.persistent and node.meta["val"].is_floating_point()


def clean(graph: fx.Graph) -> None:
    """Remove dead and duplicate nodes, and writes in place that later reads would see."""
    _use_what_is_written(graph)
    _write_nothing(graph)
    _skip_idle(graph)
    _merge_equal(graph)
    graph.eliminate_dead_code()


def _use_what_is_written(graph: fx.Graph) -> None:
    """Replace copies into slices of a tensor by new tensors, and redirect later reads to them."""
    order = {node: place for place, node in enumerate(graph.nodes)}
    for node in [each for each in graph.nodes if name_of(each) == "copy_"]:
        piece, values = node.args[:2]
        if not isinstance(piece, fx.Node) or name_of(piece) != "slice" or node.users:
            continue
        whole, *place = piece.args
        assert isinstance(whole, fx.Node)
        with graph.inserting_before(node):
            scatter = torch.ops.aten.slice_scatter.default
            written = graph.call_function(scatter, (whole, values, *place))
            written.meta["val"] = whole.meta["val"]
        for user in [each for each in whole.users if order.get(each, 0) > order[node]]:
            user.replace_input_with(whole, written)
        order[written] = order[node]
        graph.erase_node(node)


def _write_nothing(graph: fx.Graph) -> None:
    """Replace in-place operators by functional ones if their input has no earlier reader."""
    order = {node: place for place, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        name, x = name_of(node), node.args[0] if node.args else None
        functional = getattr(torch.ops.aten, name.removesuffix("_"), None)
        is_in_place = name.endswith("_") and is_pointwise(node)
        if functional is None or not is_in_place or not isinstance(x, fx.Node):
            continue
        readers = set(x.users) - {node}
        if any(order[reader] < order[node] for reader in readers):
            continue
        if x.op == "call_function" and not _may_be_view(x):
            node.target = getattr(functional, node.target._overloadname)
            for reader in readers:
                reader.replace_input_with(x, node)


def _skip_idle(graph: fx.Graph) -> None:
    """Remove nodes that return their input."""
    for node in list(graph.nodes):
        name, given = name_of(node), node.args[0] if node.args else None
        if name == "cat":
            full = [each for each in node.args[0] if "0" not in _sizes(each)]
            given = full[0] if len(full) == 1 else None
        elif name == "slice":
            given = given if _sizes(node) == _sizes(given) else None
        elif name == "dropout":
            given = given if node.args[2] is False else None
        elif name not in ("to", "type_as", "alias"):
            given = None
        if isinstance(given, fx.Node) and given.meta["val"].dtype is node.meta["val"].dtype:
            node.replace_all_uses_with(given)
            graph.erase_node(node)


def _sizes(node: Any) -> list[str]:
    return [str(size) for size in node.meta["val"].shape]


def _merge_equal(graph: fx.Graph) -> None:
    """Merge equal nodes, unless they are written to."""
    known: dict[Any, fx.Node] = {}
    written = _written(graph)
    for node in list(graph.nodes):
        name = name_of(node)
        if node.op != "call_function" or name == "attention" or name in ROW_DIMS or node in written:
            continue
        if name.startswith("new_") or name in _FRESH:
            continue
        key = (node.target, _frozen(node.args), _frozen(node.kwargs))
        first = known.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def _written(graph: fx.Graph) -> set[fx.Node]:
    """Return the tensors that operators write to in place, and these operators."""
    written: set[fx.Node] = set()
    for node in graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is None or not schema.is_mutable:
            continue
        written.add(node)
        memory = node.args[0]
        while isinstance(memory, fx.Node):
            written.add(memory)
            memory = memory.args[0] if memory.args and _may_be_view(memory) else None
    return written


def _may_be_view(node: fx.Node) -> bool:
    """Return True if a node's value may share its input's memory."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:  # an item of several results
        return node.op == "call_function"
    return name_of(node) == "type_as" or any(each.alias_info is not None for each in schema.returns)


def _frozen(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return ("list", *(_frozen(each) for each in value))
    if isinstance(value, dict):
        return tuple((key, _frozen(each)) for key, each in sorted(value.items()))
    if isinstance(value, (bool, int, float)):
        return type(value), repr(value)
    return value if isinstance(value, fx.Node) else repr(value)
