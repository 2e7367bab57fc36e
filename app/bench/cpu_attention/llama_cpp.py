"""llama.cpp's decode attention on the CPU, as a rival: the operation `flash_attn_ext` of its library ggml.

llama-cpp-python brings that library along. It is called through ctypes, without loading a model:
a graph of one operation over tensors that lie in torch's memory.
"""

import ctypes
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import POINTER, c_bool, c_char_p, c_float, c_int, c_int64, c_size_t, c_void_p
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 30}  # enum ggml_type
_ALIGNMENT = 32  # bytes; ggml ends the process where a buffer is not aligned so
_SUCCESS = 0


class _InitParams(ctypes.Structure):
    _fields_ = (("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool))


# Function -> (result, arguments...); opaque pointers are c_void_p.
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


class LlamaCppError(Exception):
    """Why there is no llama.cpp to compare with."""


class LlamaCpp:
    """ggml's CPU backend; raises LlamaCppError where it is not installed or too old."""

    def __init__(self) -> None:
        spec = importlib.util.find_spec("llama_cpp")
        if spec is None or spec.origin is None:
            raise LlamaCppError("llama-cpp-python is not installed")
        folder = Path(spec.origin).parent / "lib"
        try:
            library = ctypes.CDLL(str(folder / "libggml-cpu.so"))  # brings libggml-base along
            self._functions = {name: _function(library, name) for name in _SIGNATURES}
        except (OSError, AttributeError) as error:
            raise LlamaCppError(f"llama-cpp-python's library cannot be used: {error}") from None
        self.name = f"llama.cpp (ggml {self._functions['ggml_version']().decode()})"
        self._backend = self._functions["ggml_backend_cpu_init"]()

    @contextmanager
    def prepared(self, q: Tensor, k: Tensor, v: Tensor, num_threads: int) -> Iterator[Callable[[], Tensor]]:
        """As Rival says; ggml wants queries in fp32 and answers so."""
        call = self._functions
        queries = q.float().contiguous()
        out = torch.empty_like(queries)
        size = 8 * call["ggml_tensor_overhead"]() + call["ggml_graph_overhead"]()
        context = call["ggml_init"](_InitParams(size, None, True))
        buffers = []

        def place(tensor: int, data: Tensor) -> int:
            if data.data_ptr() % _ALIGNMENT != 0 or not data.is_contiguous():
                raise ValueError(f"ggml needs contiguous tensors at multiples of {_ALIGNMENT} bytes")
            buffers.append(call["ggml_backend_cpu_buffer_from_ptr"](data.data_ptr(), data.nbytes))
            call["ggml_backend_tensor_alloc"](buffers[-1], tensor, data.data_ptr())
            return tensor

        def leaf(data: Tensor) -> int:
            dims = (c_int64 * data.ndim)(*reversed(data.shape))  # ggml counts from the innermost one
            return place(call["ggml_new_tensor"](context, _TYPES[data.dtype], data.ndim, dims), data)

        def attend() -> Tensor:
            status = call["ggml_backend_graph_compute"](self._backend, graph)
            if status != _SUCCESS:
                raise RuntimeError(f"ggml failed with status {status}")
            return out

        try:
            result = call["ggml_flash_attn_ext"](
                context, leaf(queries.unsqueeze(2)), leaf(k), leaf(v), None, q.shape[-1] ** -0.5, 0.0, 0.0
            )
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
