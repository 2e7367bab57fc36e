"""A stand-in for llama-cpp-python's module, with a model whose next token is the sum of all before it.

It computes from what it was given for KV alone: tokens at wrong positions, in wrong sequences or beyond the
context change its answers or raise. The environment variable FAKE_LLAMA_CPP makes it fail.
"""

import ctypes
import os
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

__version__ = "0.0-fake"
VOCAB_SIZE = 257
_FAILURE = os.environ.get("FAKE_LLAMA_CPP", "")
_log: Callable[[int, bytes, object], None] = lambda level, text, data: None  # noqa: E731


class llama_batch(ctypes.Structure):  # noqa: N801 - as in llama.h
    _fields_ = (
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.POINTER(ctypes.c_float)),
        ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    )


def llama_log_callback(function: Any) -> Any:
    return function


def llama_log_set(callback: Any, data: object) -> None:
    global _log  # noqa: PLW0603
    _log = callback


def _complain(text: str) -> None:
    _log(2, b"something that nobody wants to read", None)
    _log(4, text.encode(), None)


def llama_max_parallel_sequences() -> int:
    return 256


def llama_supports_gpu_offload() -> bool:
    return False


def llama_model_default_params() -> SimpleNamespace:
    return SimpleNamespace(n_gpu_layers=-1)


def llama_model_load_from_file(path: bytes, params: Any) -> SimpleNamespace | None:
    with open(path, "rb") as file:
        if file.read(4) != b"GGUF" or _FAILURE == "load":
            _complain("no model in it")
            return None
    return SimpleNamespace(freed=False)


def llama_model_get_vocab(model: Any) -> Any:
    return model


def llama_vocab_n_tokens(vocab: Any) -> int:
    return VOCAB_SIZE


def llama_context_default_params() -> SimpleNamespace:
    return SimpleNamespace(n_batch=64)


def llama_init_from_model(model: Any, params: Any) -> SimpleNamespace | None:
    if _FAILURE == "memory" or params.n_seq_max > 12:
        _complain("no memory for KV")
        return None
    kv: dict[int, dict[int, int]] = {sequence: {} for sequence in range(params.n_seq_max)}
    return SimpleNamespace(
        kv=kv, n_batch=params.n_batch, room=params.n_ctx // params.n_seq_max, logits=None, batches=[]
    )


def llama_get_memory(context: Any) -> Any:
    return context


def llama_n_batch(context: Any) -> int:
    return int(context.n_batch)


def llama_memory_seq_rm(context: Any, sequence: int, begin: int, end: int) -> bool:
    assert (begin, end) == (-1, -1)
    context.kv[sequence].clear()
    return True


def llama_decode(context: Any, batch: llama_batch) -> int:
    if _FAILURE == "decode":
        _complain("no room in KV")
        return 1
    if _FAILURE == "die":
        print("out of GPU memory", file=sys.stderr)
        os._exit(7)
    assert 0 < batch.n_tokens <= context.n_batch
    rows = []
    for index in range(batch.n_tokens):
        assert batch.n_seq_id[index] == 1
        kv = context.kv[batch.seq_id[index][0]]
        assert batch.pos[index] == len(kv) < context.room, "a gap, or more than there is room for"
        kv[batch.pos[index]] = batch.token[index]
        if batch.logits[index]:
            rows.append([float(token == sum(kv.values()) % VOCAB_SIZE) for token in range(VOCAB_SIZE)])
    context.logits = (ctypes.c_float * (len(rows) * VOCAB_SIZE))(*(value for row in rows for value in row))
    context.batches.append((batch.n_tokens, len(rows)))
    return 0


def llama_get_logits(context: Any) -> Any:
    return ctypes.cast(context.logits, ctypes.POINTER(ctypes.c_float))


def llama_free(context: Any) -> None:
    context.kv = None


def llama_model_free(model: Any) -> None:
    assert not model.freed
    model.freed = True
