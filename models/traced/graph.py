"""The code of a model of `transformers` as a graph of operators, in which tokens meet in attention only."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export.graph_signature import InputKind
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from neo_desktop.models.traced.capture import Calls, CannotCutError
from neo_desktop.models.traced.outline import cannot_cut, empty_model, parameters_of, run
from neo_desktop.models.traced.source import Source

ROWS = 7  # of the numbers that the graph is made with; it serves any number

# Operators that treat each row alike, whatever the other rows are. Others are refused.
# fmt: off
_ELEMENTWISE = frozenset((
    "add", "sub", "mul", "div", "neg", "pow", "rsqrt", "sqrt", "reciprocal", "exp", "expm1", "log",
    "log1p", "tanh", "floor",
    "sigmoid", "silu", "gelu", "relu", "relu6", "cos", "sin", "erf", "abs", "square", "clamp",
    "clamp_min", "clamp_max", "where", "minimum", "maximum", "softplus", "hardtanh", "hardswish",
    "hardsigmoid", "elu", "mish", "leaky_relu", "to", "type_as", "_to_copy", "clone", "contiguous",
    "detach", "alias", "dropout", "rsub", "ge", "gt", "le", "lt", "eq", "ne", "logical_and",
    "logical_or", "logical_not", "masked_fill", "bitwise_and", "zeros_like", "ones_like", "full_like",
    "lift_fresh_copy", "getitem", "view", "reshape", "_unsafe_view", "transpose", "permute",
    "unsqueeze", "squeeze", "expand", "expand_as", "broadcast_to",
    "flatten", "unflatten", "t", "movedim", "add_",
    "mul_", "div_", "sub_", "silu_", "relu_",
))
# fmt: on
_OVER_DIMS = frozenset(("mean", "sum", "softmax", "var", "std", "amax", "amin", "linalg_vector_norm"))
_OVER_ONE = frozenset(
    ("slice", "select", "cat", "stack", "split", "split_with_sizes", "chunk", "unbind", "repeat_interleave")
)
_OF_LAST = frozenset(("layer_norm", "rms_norm"))
_PRODUCTS = frozenset(("linear", "matmul", "mm", "bmm", "addmm", "embedding"))
_KINDS = {
    "dims": _OVER_DIMS,
    "one": _OVER_ONE,
    "last": _OF_LAST,
    "product": _PRODUCTS,
    "two": frozenset(("min", "max")),
    "index": frozenset(("index",)),
}


class Exported:
    """A graph with what its inputs stand for.

    Args:
        graph: of `torch.export`; nothing in it is without use.
        parameters: input -> name of the parameter.
        buffers: input -> its value.
        token_ids: the input; positions likewise.
    """

    def __init__(
        self,
        graph: fx.Graph,
        parameters: dict[fx.Node, str],
        buffers: dict[fx.Node, Tensor],
        token_ids: fx.Node,
        positions: fx.Node,
    ) -> None:
        self.graph = graph
        self.parameters = parameters
        self.buffers = buffers
        self.token_ids = token_ids
        self.positions = positions


class _Scores(nn.Module):
    def __init__(self, model: Any, calls: Calls) -> None:
        super().__init__()
        self.model = model
        self._calls = calls

    def forward(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        return run(self.model, token_ids, positions, self._calls)


def exported(source: Source, dtype: torch.dtype, aliases: dict[str, str]) -> Exported:
    """Export a model, computing in a dtype.

    Args:
        aliases: other names of its parameters -> names.

    Raises:
        ModelError: it cannot be followed, or its rows are not independent of each other.
    """
    model = empty_model(source, dtype)
    try:
        _fill_buffers(model)
        with FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True):
            known: dict[int, nn.Parameter] = {}
            for module, name, parameter in parameters_of(model):
                if id(parameter) not in known:
                    numbers = torch.empty(parameter.shape, dtype=parameter.dtype)
                    known[id(parameter)] = nn.Parameter(numbers, requires_grad=False)
                module._parameters[name] = known[id(parameter)]
            ids = torch.zeros(1, ROWS, dtype=torch.int64)
            positions = torch.zeros(1, ROWS, dtype=torch.int64)
        shapes = ({1: torch.export.Dim.DYNAMIC}, {1: torch.export.Dim.DYNAMIC})
        with torch.no_grad():
            program = torch.export.export(
                _Scores(model, Calls()), (ids, positions), dynamic_shapes=shapes, strict=False
            )
        return _cleaned(program, aliases)
    except Exception as error:  # of whatever kind: it is other people's code
        raise cannot_cut(source, model, error) from error


def _fill_buffers(model: Any) -> None:
    """Compute what is computed when a model is made, such as frequencies of rotations."""
    for module in model.modules():
        own = {name: buffer for name, buffer in module._buffers.items() if buffer is not None}
        for name, buffer in own.items():
            fill = float("nan") if buffer.is_floating_point() else 0
            module._buffers[name] = torch.full(buffer.shape, fill, dtype=buffer.dtype)
        if own:
            model._init_weights(module)
        for name in own.keys() & module._non_persistent_buffers_set:  # checkpoints have the others
            if module._buffers[name].isnan().any():
                raise CannotCutError(f"what its buffer {name} holds is not known")


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
    _skip_idle(graph)
    _merge_equal(graph)
    graph.eliminate_dead_code()
    token_ids, positions = inputs
    found_ = Exported(graph, parameters, buffers, token_ids, positions)
    _check_rows(found_)
    return found_


def _is_stored(spec: Any, node: fx.Node) -> bool:
    """Return whether checkpoints have a buffer; see `outline`."""
    return spec.kind is InputKind.BUFFER and spec.persistent and node.meta["val"].is_floating_point()


def name_of(node: fx.Node) -> str:
    """Return the name of a node's operator without overload: "add"."""
    target = node.target
    packet = getattr(target, "overloadpacket", None)
    return str(getattr(packet, "__name__", getattr(target, "__name__", target)))


def _skip_idle(graph: fx.Graph) -> None:
    """Leave out what gives the numbers that it is given."""
    for node in list(graph.nodes):
        name, given = name_of(node), node.args[0] if node.args else None
        if name == "cat":
            full = [each for each in node.args[0] if "0" not in _sizes(each)]
            given = full[0] if len(full) == 1 else None
        elif name == "slice":
            is_whole = (
                given is not None and _sizes(node) == _sizes(given) and tuple(node.args[2:3]) in ((), (0,))
            )
            given = given if is_whole else None
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
    """Let what is computed twice be computed once."""
    known: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or name_of(node) == "attention":
            continue
        key = (node.target, _frozen(node.args), _frozen(node.kwargs))
        first = known.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def _frozen(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return ("list", *(_frozen(each) for each in value))
    if isinstance(value, dict):
        return tuple((key, _frozen(each)) for key, each in sorted(value.items()))
    if isinstance(value, (bool, int, float)):
        return type(value), repr(value)
    return value if isinstance(value, fx.Node) else repr(value)


def row_dim(node: fx.Node) -> int | None:
    """Return which dimension of a node's value has the rows; None: it has none.

    Raises:
        CannotCutError: rows are not one dimension of it.
    """
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return None
    dims = [dim for dim, size in enumerate(value.shape) if not isinstance(size, int)]
    if not dims:
        return None
    if len(dims) > 1 or not str(value.shape[dims[0]]).isidentifier():
        raise CannotCutError(f"{name_of(node)} mixes tokens")
    return dims[0]


def _check_rows(exported_: Exported) -> None:
    """Raise CannotCutError where a token would depend on others by anything else than attention."""
    for node in exported_.graph.nodes:
        if node.op != "call_function" or not isinstance(node.meta.get("val"), (Tensor, list, tuple)):
            continue
        given = [each for each in node.all_input_nodes if row_dim(each) is not None]
        name = name_of(node)
        if isinstance(node.meta["val"], Tensor):
            row_dim(node)
        if name == "attention" or not given:
            continue
        if name in _ELEMENTWISE or _CHECKS.get(_kind(name), _refused)(node, given):
            continue
        raise CannotCutError(f"{name} may mix tokens")


def _kind(name: str) -> str:
    for kind, names in _KINDS.items():
        if name in names:
            return kind
    return ""


def _index(node: fx.Node, given: list[fx.Node]) -> bool:
    indices = node.args[1]
    own = row_dim(given[0])
    return (
        len(given) == 1
        and isinstance(indices, (list, tuple))
        and (len(indices) <= (own or 0) or indices[own or 0] is None)
    )


def _of_two(node: fx.Node, _given: list[fx.Node]) -> bool:
    return len(node.args) == 2 and isinstance(node.args[1], fx.Node)


def _refused(_node: fx.Node, _given: list[fx.Node]) -> bool:
    return False


def _over_dims(node: fx.Node, given: list[fx.Node]) -> bool:
    dims = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    if dims is None:
        return False
    rank = given[0].meta["val"].dim()
    over: Any = [dims] if isinstance(dims, int) else dims
    return row_dim(given[0]) not in [dim % rank for dim in over]


def _over_one(node: fx.Node, given: list[fx.Node]) -> bool:
    place = {"slice": 1, "select": 1, "cat": 1, "stack": 1, "unbind": 1, "narrow": 1}.get(name_of(node), 2)
    dim = node.args[place] if len(node.args) > place else node.kwargs.get("dim", 0)
    rank = given[0].meta["val"].dim()
    if not isinstance(dim, int):
        return False
    if row_dim(given[0]) != dim % rank:
        return True
    return name_of(node) == "slice" and tuple(node.args[2:]) in ((), (0,), (0, 2**63 - 1))


def _over_last(node: fx.Node, given: list[fx.Node]) -> bool:
    shape = node.args[1]
    rank = given[0].meta["val"].dim()
    return isinstance(shape, (list, tuple)) and row_dim(given[0]) not in range(rank - len(shape), rank)


def _product(node: fx.Node, given: list[fx.Node]) -> bool:
    name = name_of(node)
    if name == "embedding":
        return True
    if len(given) > 1:
        return False
    places = {"linear": (0, None), "addmm": (1, 2)}.get(name, (0, 1))
    left = node.args[places[0] or 0]
    rank = given[0].meta["val"].dim()
    if left is given[0]:
        return bool(row_dim(given[0]) != rank - 1)
    right = places[1]
    return bool(right is not None and node.args[right] is given[0] and row_dim(given[0]) != rank - 2)


_CHECKS: dict[str, Callable[[fx.Node, list[fx.Node]], bool]] = {
    "dims": _over_dims,
    "one": _over_one,
    "last": _over_last,
    "product": _product,
    "two": _of_two,
    "index": _index,
}
