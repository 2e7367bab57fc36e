"""A pytest plugin for the imitated GPU: operations run on the CPU, in the order of their streams.

The memory of the imitated GPU is host memory. So a torch operator is put on the current stream as a Python
function that computes the same on views of that memory; a Triton kernel runs there in Triton's interpreter.
The rest is real: torch's streams, events, allocators and graphs, the engine, the relay. Torch also keeps its
own operators for views and for memory allocation.
"""

import ctypes
import os
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any

os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton's import; see also `ptx.engine`

import pytest
import torch
from dense_attention import dense
from imitated_device import RUNTIME, imitated_device
from imitated_kernels import compute_kernel, interpret
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from triton.runtime.interpreter import GridExecutor

_runtime = ctypes.CDLL(RUNTIME, mode=os.RTLD_NOLOAD | ctypes.RTLD_GLOBAL)
_Work = ctypes.CFUNCTYPE(None, ctypes.c_long)
_runtime.imitated_gpu_enqueue.argtypes = [ctypes.c_void_p, ctypes.c_long, _Work, ctypes.c_char_p]
_runtime.cudaGetErrorString.restype = ctypes.c_char_p
_works: dict[int, tuple[bytes, Callable[[], object]]] = {}  # never freed: graphs may run them again
_numbers = count()
_generators: dict[int, tuple[torch.Generator, torch.Generator]] = {}  # on the GPU, and its CPU twin
_pinned: list[Tensor] = []  # copies keep pinned memory until they end, as in torch

# Not computed here: views, memory operations, and operators that engines never use.
_LEFT = (
    "empty set_ resize record_stream as_strided view _reshape_alias unfold is_pinned _pin_memory copy_ "
    "_to_copy _copy_from _local_scalar _flash _efficient _scaled_dot _scaled_mm _assert nonzero unique "
    "equal cudnn _cudnn miopen _thnn _foreach _fused_a _fused_s _fused_m sparse _sparse _nested _cslt _fft "
    "linalg _linalg _ctc quantize _transformer _weight _amp _pdist _embedding_bag embedding_dense fake "
    "_fake _fbgemm"
)
_COMPUTED_ALL_THE_SAME = ("linalg_vector_norm",)
_COMPOSITE_BUT_COMPUTED = ("_fused_rms_norm", "native_layer_norm")


@_Work
def _carry_out(number: int) -> None:
    name, work = _works[number]
    try:
        with torch.inference_mode():
            work()
    except BaseException:  # on a real GPU all later work would fail as well
        traceback.print_exc()
        print(f"the imitated GPU could not compute {name.decode()}", flush=True)
        os._exit(1)


def enqueue(name: str, work: Callable[[], object]) -> None:
    """Put work on the current stream; a capture records it instead."""
    number = next(_numbers)
    _works[number] = name.encode(), work
    stream = torch.cuda.current_stream().cuda_stream
    error = _runtime.imitated_gpu_enqueue(stream, number, _carry_out, _works[number][0])
    if error := error or _runtime.cudaGetLastError():  # torch asks for it after each launch
        failed = torch.AcceleratorError(
            f"CUDA error: {_runtime.cudaGetErrorString(error).decode()} in {name}"
        )
        failed.error_code = error  # type: ignore[attr-defined]
        raise failed


class _Place:
    """A tensor's location in memory that the GPU sees; like a kernel, it keeps no tensor alive."""

    def __init__(self, tensor: Tensor) -> None:
        self._address, self._dtype = tensor.data_ptr(), tensor.dtype
        self._size, self._stride = tuple(tensor.shape), tensor.stride()
        last = sum((size - 1) * stride for size, stride in zip(self._size, self._stride, strict=True))
        self._bytes = (1 + last) * tensor.element_size() if tensor.numel() else 0

    def open(self) -> Tensor:
        if not self._bytes:
            return torch.empty(self._size, dtype=self._dtype)
        memory = (ctypes.c_ubyte * self._bytes).from_address(self._address)
        return (
            torch.frombuffer(memory, dtype=torch.uint8).view(self._dtype).as_strided(self._size, self._stride)
        )


class _Value:
    """A scalar argument of a kernel."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor.detach().clone()

    def open(self) -> Tensor:
        return self._tensor


def _closed(value: object) -> object:
    if isinstance(value, Tensor):
        return _Place(value) if value.is_cuda or value.is_pinned() else _Value(value)
    if isinstance(value, torch.Generator) and value.device.type == "cuda":
        stand_in = torch.Generator().manual_seed(value.initial_seed())
        return _generators.setdefault(id(value), (value, stand_in))[1]
    return torch.device("cpu") if isinstance(value, torch.device) else value


def _opened(value: object) -> object:
    return value.open() if isinstance(value, (_Place, _Value)) else value


def _outline(value: object) -> object:
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    if isinstance(value, torch.Generator):
        return None
    return torch.device("meta") if isinstance(value, torch.device) else value


def _on_gpu(value: object) -> object:
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda")


def _imitation(operator: Any) -> Callable[..., object]:
    schema, name = operator._schema, operator.name()
    tensors = {a.name for a in schema.arguments if str(a.type) == "Tensor"}
    written = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]

    def call(*args: object, **kwargs: object) -> object:
        given = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | kwargs
        for each in tensors.intersection(given):  # torch unwraps scalar tensors
            given[each] = torch.as_tensor(given[each])
        if any(isinstance(x, Tensor) and not x.is_cuda and x.dim() > 0 for x in tree_leaves(given)):
            raise RuntimeError(f"{name}: a tensor of the CPU among those of the GPU")
        if written:
            if name.endswith("out"):
                results = tree_leaves(operator(**tree_map(_outline, given)))
                for target, result in zip(written, results, strict=True):
                    if given[target].shape != result.shape:
                        given[target].resize_(result.shape)
            closed = tree_map(_closed, given)
            enqueue(name, lambda: operator(**tree_map(_opened, closed)))
            outputs = tuple(given[target] for target in written)
            return outputs[0] if len(schema.returns) == 1 else outputs or None
        closed = tree_map(_closed, given)
        results = tree_map(_on_gpu, operator(**tree_map(_outline, given)))
        targets = [_Place(x) for x in tree_leaves(results) if isinstance(x, Tensor)]

        def compute() -> None:
            found = [x for x in tree_leaves(operator(**tree_map(_opened, closed))) if isinstance(x, Tensor)]
            for target, result in zip(targets, found, strict=True):
                target.open().copy_(result)

        enqueue(name, compute)
        return results

    return call


def _is_one_piece(target: Tensor, source: Tensor) -> bool:
    return target.dtype == source.dtype and target.is_contiguous() and source.is_contiguous()


def _copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    if not target.numel():  # torch skips CUDA for empty tensors
        return target
    on_host = [x for x in (target, source) if not x.is_cuda]
    if len(on_host) == 1 and target.dim() and not _is_one_piece(target, source):
        # Over the bus, torch copies contiguous data; a kernel does the rest.
        if source.is_cuda and not target.is_contiguous():
            on_host = _copy(torch.empty(target.shape, dtype=target.dtype), source)
            return target.copy_(on_host)
        piece = torch.empty(target.shape, dtype=target.dtype, device="cuda")
        if source.is_cuda:
            _copy(piece, source)
            return _copy(target, piece, non_blocking)
        _copy(piece, source.to(target.dtype).expand(target.shape).contiguous(), non_blocking)
        return _copy(target, piece)
    is_pageable = not all(x.is_pinned() for x in on_host)
    is_captured = torch.cuda.is_current_stream_capturing()
    if is_captured and is_pageable:
        raise RuntimeError("memory that is not pinned is copied in a capture")
    if not is_captured:
        _pinned.extend(on_host)
    place, given = _Place(target), _closed(source.expand(target.shape))
    enqueue("copy", lambda: place.open().copy_(_opened(given)))
    if on_host and not is_captured and (is_pageable or not non_blocking):
        torch.cuda.current_stream().synchronize()
    return target


def _equal(a: Tensor, b: Tensor) -> bool:
    torch.cuda.current_stream().synchronize()
    return torch.equal(_Place(a).open(), _Place(b).open())


def _item(tensor: Tensor) -> object:
    torch.cuda.current_stream().synchronize()
    return _Place(tensor).open().item()


def _flash(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **kwargs: Any) -> tuple[object, ...]:
    ends_q, ends_k, max_q, max_k, _dropout, is_causal, _mask = rest
    left, right = kwargs["window_size_left"], kwargs["window_size_right"]
    window = None if left < 0 else left + 1
    assert right == 0
    assert is_causal == (window is None)
    assert all(x.is_cuda and x.stride(-1) == 1 for x in (q, k, v, ends_q, ends_k))
    assert ends_q.dtype == ends_k.dtype == torch.int32
    out, nothing = torch.empty_like(q), torch.empty(0, device="cuda")
    places = [_Place(x) for x in (q, k, v, ends_q, ends_k, out)]

    def compute() -> None:
        queries, keys, values, *ends, outputs = (place.open() for place in places)
        q_ends, k_ends = (each.tolist() for each in ends)
        for i in range(len(q_ends) - 1):
            rows, context = slice(*q_ends[i : i + 2]), slice(*k_ends[i : i + 2])
            assert rows.stop - rows.start <= max_q
            assert context.stop - context.start <= max_k
            k, v = keys[context], values[context]
            outputs[rows] = dense(queries[rows], k, v, kwargs["scale"], window)

    enqueue("flash attention", compute)
    return out, nothing, nothing, nothing, nothing


def _efficient(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **kwargs: Any) -> tuple[object, ...]:
    *_, mask = rest  # later arguments have their defaults
    assert mask == 2  # the last query sees the last key, and no sums of scores are requested
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    out, nothing = torch.empty(q.shape, dtype=q.dtype, device="cuda"), torch.empty(0, device="cuda")
    sums = torch.empty(len(q), q.shape[2], 0, device="cuda")
    places = [_Place(x) for x in (q, k, v, out)]

    def compute() -> None:
        for queries, keys, values, outputs in zip(*(place.open() for place in places), strict=True):
            outputs.copy_(dense(queries, keys, values, kwargs["scale"], None))

    enqueue("memory-efficient attention", compute)
    return out, sums, nothing, nothing, 0, 0


def _operators() -> Sequence[tuple[str, Any]]:
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    found = []
    for name in torch._C._dispatch_get_all_op_names():
        base, _, overload = name.removeprefix("aten::").partition(".")
        is_left = base.startswith(tuple(_LEFT.split())) and base not in _COMPUTED_ALL_THE_SAME
        is_operator = name.startswith("aten::") and not is_left
        if not is_operator or not has_kernel(name, "CUDA"):
            continue
        composite = any(has_kernel(name, f"Composite{kind}Autograd") for kind in ("Implicit", "Explicit"))
        if (not composite or base in _COMPOSITE_BUT_COMPUTED) and hasattr(torch.ops.aten, base):
            found.append((name, getattr(getattr(torch.ops.aten, base), overload or "default")))
    return found


def _spoiled() -> Sequence[str]:
    """Return the names of the Triton kernels that compute wrong results on request."""
    return os.environ.get("IMITATED_GPU_SPOIL", "").split(",")


def _imitate_kernels() -> None:
    def call(executor: Any, *args: object, **kwargs: object) -> None:
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if not any(x.is_cuda for x in tensors):
            interpret(executor, *args, **kwargs)
            return
        if not all(x.is_cuda or x.is_pinned() for x in tensors):
            raise RuntimeError(f"{executor.fn.__name__}: a kernel is given memory of the CPU")
        closed = tree_map(_closed, (args, kwargs))

        name = executor.fn.__name__

        def compute() -> None:
            positional, named = tree_map(_opened, closed)
            compute_kernel(executor, positional, named)
            if name in _spoiled():
                positional[executor.arg_names.index("out")].add_(1)

        enqueue(name, compute)

    GridExecutor.__call__ = call


def _give_back_cached_memory(give_back: Callable[[], None] = torch.cuda.empty_cache) -> None:
    # torch holds the GIL while it waits for the GPU, which computes in Python here.
    torch.cuda.synchronize()
    give_back()


@pytest.fixture(autouse=True)
def _no_deadlock() -> Iterator[None]:
    """Fail a test with an unexpected deadlock, even if the engine handles the error."""
    yield
    device = imitated_device()
    assert device is not None
    if device.num_deadlocks:
        device.recover()
        pytest.fail("the imitated GPU came to a deadlock: what its queues waited for is told above")


warnings.filterwarnings("ignore", message="Warning only once for all operators")
_library = torch.library.Library("aten", "IMPL")
for _name, _operator in _operators():
    _library.impl(_name, _imitation(_operator), "CUDA")
_library.impl("copy_", _copy, "CUDA")
_library.impl("_local_scalar_dense", _item, "CUDA")
_library.impl("equal", _equal, "CUDA")
_library.impl("_flash_attention_forward", _flash, "CUDA")
_library.impl("_efficient_attention_forward", _efficient, "CUDA")
for _kernel in ("flash", "mem_efficient", "cudnn"):
    getattr(torch.backends.cuda, f"enable_{_kernel}_sdp")(False)  # SDPA then uses plain operators
_imitate_kernels()
torch.cuda.empty_cache = _give_back_cached_memory
