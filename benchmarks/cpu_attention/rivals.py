"""Other implementations on the same work: torch's scaled_dot_product_attention, llama.cpp's flash attention.

Both get gathered keys and values, contiguous per request and head, which favours them. Only the attention is
timed. It can be a hundred times slower than the memory allows, so a case starts with one request and doubles
its batch while time is left. Bytes per second count.
"""

import ctypes
import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from ctypes import POINTER, c_bool, c_char_p, c_float, c_int, c_int64, c_size_t, c_void_p
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.cpu_attention.options import Options, Shape
from benchmarks.cpu_attention.pool import Pool, seeded

_CALLS = 3  # with the final batch, if one call does not take too long


class Rival(Protocol):
    """Another implementation of decode attention."""

    name: str  # for people

    def prepared(
        self, q: Tensor, k: Tensor, v: Tensor, num_threads: int
    ) -> AbstractContextManager[Callable[[], Tensor]]:
        """Get ready to attend.

        Args:
            q: [batch, heads, head_dim].
            k: [batch, kv_heads, tokens, head_dim], contiguous.
            v: as k.
            num_threads: upper limit.

        Yields:
            A function that runs the attention and returns [batch, heads, head_dim].
        """


class TorchSdpa:
    """torch's own choice of kernel."""

    name = "torch SDPA"

    @contextmanager
    def prepared(self, q: Tensor, k: Tensor, v: Tensor, num_threads: int) -> Iterator[Callable[[], Tensor]]:
        """Prepare the call."""
        grouped, threads_before = q.shape[1] != k.shape[1], torch.get_num_threads()
        torch.set_num_threads(num_threads)
        try:
            yield lambda: scaled_dot_product_attention(q.unsqueeze(2), k, v, enable_gqa=grouped).squeeze(2)
        finally:
            torch.set_num_threads(threads_before)


_GGML_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 30}  # enum ggml_type
_GGML_ALIGNMENT = 32  # bytes; ggml ends the process if a buffer has another alignment


class _InitParams(ctypes.Structure):
    _fields_ = (("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool))


# Function of ggml.h, ggml-backend.h and ggml-cpu.h → (result, arguments...); opaque pointers are c_void_p.
_SIGNATURES: dict[str, tuple[type | None, ...]] = {
    "ggml_init": (c_void_p, _InitParams),
    "ggml_free": (None, c_void_p),
    "ggml_tensor_overhead": (c_size_t,),
    "ggml_graph_overhead": (c_size_t,),
    "ggml_new_tensor": (c_void_p, c_void_p, c_int, c_int, POINTER(c_int64)),
    "ggml_flash_attn_ext": (c_void_p, *[c_void_p] * 5, c_float, c_float, c_float),
    "ggml_new_graph": (c_void_p, c_void_p),
    "ggml_build_forward_expand": (None, c_void_p, c_void_p),
    "ggml_backend_cpu_buffer_from_ptr": (c_void_p, c_void_p, c_size_t),
    "ggml_backend_buffer_free": (None, c_void_p),
    "ggml_backend_tensor_alloc": (c_int, c_void_p, c_void_p, c_void_p),
    "ggml_backend_cpu_init": (c_void_p,),
    "ggml_backend_cpu_set_n_threads": (None, c_void_p, c_int),
    "ggml_backend_graph_compute": (c_int, c_void_p, c_void_p),
    "ggml_version": (c_char_p,),
}


class LlamaCpp:
    """Flash attention through the public C API of ggml, the library of llama-cpp-python.

    Raises OSError or AttributeError if it is missing or too old.
    """

    def __init__(self) -> None:
        spec = importlib.util.find_spec("llama_cpp")
        if spec is None or spec.origin is None:
            raise OSError("llama-cpp-python is not installed")
        library = ctypes.CDLL(str(Path(spec.origin).parent / "lib" / "libggml-cpu.so"))
        self._functions = {name: _function(library, name) for name in _SIGNATURES}
        self.name = f"llama.cpp (ggml {self._functions['ggml_version']().decode()})"
        self._backend = self._functions["ggml_backend_cpu_init"]()

    @contextmanager
    def prepared(self, q: Tensor, k: Tensor, v: Tensor, num_threads: int) -> Iterator[Callable[[], Tensor]]:
        """Prepare a graph of one operation over torch's memory; ggml requires queries in fp32."""
        call = self._functions
        queries = q.float().contiguous()
        out = torch.empty_like(queries)
        size = 8 * call["ggml_tensor_overhead"]() + call["ggml_graph_overhead"]()
        context = call["ggml_init"](_InitParams(size, None, True))
        buffers = []

        def place(tensor: int, data: Tensor) -> int:
            if data.data_ptr() % _GGML_ALIGNMENT != 0 or not data.is_contiguous():
                raise ValueError(f"ggml needs contiguous tensors at multiples of {_GGML_ALIGNMENT} bytes")
            buffers.append(call["ggml_backend_cpu_buffer_from_ptr"](data.data_ptr(), data.nbytes))
            call["ggml_backend_tensor_alloc"](buffers[-1], tensor, data.data_ptr())
            return tensor

        def leaf(data: Tensor) -> int:
            dims = (c_int64 * data.ndim)(*reversed(data.shape))  # ggml's innermost dimension comes first
            return place(call["ggml_new_tensor"](context, _GGML_TYPES[data.dtype], data.ndim, dims), data)

        def attend() -> Tensor:
            if (status := call["ggml_backend_graph_compute"](self._backend, graph)) != 0:
                raise RuntimeError(f"ggml failed with status {status}")
            return out

        try:
            leaves = leaf(queries.unsqueeze(2)), leaf(k), leaf(v)
            result = call["ggml_flash_attn_ext"](context, *leaves, None, q.shape[-1] ** -0.5, 0.0, 0.0)
            place(result, out)
            graph = call["ggml_new_graph"](context)
            call["ggml_build_forward_expand"](graph, result)
            call["ggml_backend_cpu_set_n_threads"](self._backend, num_threads)
            yield attend
        finally:
            for buffer in buffers:
                call["ggml_backend_buffer_free"](buffer)
            call["ggml_free"](context)


def _function(library: ctypes.CDLL, name: str) -> Any:
    function = getattr(library, name)
    function.restype, *function.argtypes = _SIGNATURES[name]
    return function


def find_rivals(options: Options) -> list[Rival]:
    """Return the rivals of this number format that are installed; print why others are missing."""
    if options.dtype is torch.int8:
        print("torch SDPA and llama.cpp are compared with float16 and bfloat16 KV only.")
        return []
    try:
        return [TorchSdpa(), LlamaCpp()]
    except (OSError, AttributeError) as error:
        print(f"llama.cpp is not compared: {error}")
        return [TorchSdpa()]


def rival_gb_per_s(rival: Rival, pool: Pool, options: Options, shape: Shape, seconds: float) -> float:
    """Call it for about this time, at least once; return the median rate of KV."""
    deadline, turn = time.perf_counter() + seconds, 0

    def timed(batch: int) -> float:
        nonlocal turn
        turn += 1
        k, v = pool.gathered(replace(shape, batch=batch), turn)
        q = torch.randn(batch, shape.kv_heads * shape.group, shape.head_dim, generator=seeded())
        with rival.prepared(q.to(options.compute_dtype), k, v, options.threads) as attend:
            start = time.perf_counter()
            attend()
            return time.perf_counter() - start

    batch = 1
    calls = [timed(batch)]
    while batch < shape.batch and time.perf_counter() + 2 * _CALLS * calls[-1] < deadline:
        batch = min(2 * batch, shape.batch)
        calls = [timed(batch)]
    while time.perf_counter() + calls[-1] < deadline:
        calls.append(timed(batch))
    return replace(shape, batch=batch).kv_bytes(options.dtype) / statistics.median(calls) / 1e9
