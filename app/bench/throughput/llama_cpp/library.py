"""llama.cpp through llama-cpp-python: a model with a KV cache for many sequences."""

import ctypes
import importlib.util
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 30}  # enum ggml_type
_LOG_ERROR = 4  # enum ggml_log_level
_LOG_MORE = 5  # goes on with the line before

_errors: deque[str] = deque(maxlen=5)  # what llama.cpp said last
_callbacks: list[Any] = []  # llama.cpp calls them until the program ends


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens of one sequence for the next step; logits are wanted of the last one or of none."""

    sequence: int
    start: int  # position of the first token
    tokens: Sequence[int]
    wants_logits: bool


@dataclass(frozen=True, slots=True)
class ContextOptions:
    """What llama.cpp is asked for; everything else is its default."""

    dtype: torch.dtype  # of KV
    num_sequences: int  # at the same time; fewer if there is no memory for so many
    tokens_per_sequence: int
    num_threads: int
    on_gpu: bool  # weights, KV and all of the work; else none of it


def check_installed() -> None:
    """Raise ValueError, which tells what to install, unless all that is needed is there."""
    missing = [
        name
        for module, name in (("llama_cpp", "llama-cpp-python"), ("gguf", "gguf"))
        if importlib.util.find_spec(module) is None
    ]
    if missing:
        raise ValueError(
            f"--baseline llama.cpp needs {' and '.join(missing)}: pip install 'neo-desktop[llamacpp]'"
        )


def load_library() -> Any:
    """Return llama-cpp-python's module; RuntimeError for one that is too old."""
    library = importlib.import_module("llama_cpp")
    for name in ("llama_get_memory", "llama_memory_seq_rm", "llama_max_parallel_sequences"):
        if not hasattr(library, name):
            raise RuntimeError(
                f"llama-cpp-python {library.__version__} is too old, it lacks {name}: "
                "pip install --upgrade 'neo-desktop[llamacpp]'"
            )
    _listen(library)
    return library


def _listen(library: Any) -> None:
    """Keep the errors that llama.cpp logs, and drop the rest."""
    level_before = 0

    @library.llama_log_callback  # type: ignore[untyped-decorator]
    def keep(level: int, text: bytes, user_data: object) -> None:
        nonlocal level_before
        level_before = level_before if level == _LOG_MORE else level
        if level_before == _LOG_ERROR and text.strip():
            _errors.append(text.decode(errors="replace").strip())

    _callbacks.append(keep)
    library.llama_log_set(keep, ctypes.c_void_p(0))


def _failure(what: str) -> RuntimeError:
    said = "; ".join(_errors) or "it does not say why"
    _errors.clear()
    return RuntimeError(f"llama.cpp could not {what}: {said}")


class Context:
    """A loaded model and its KV cache; `close` frees both.

    Raises RuntimeError where llama.cpp cannot load the file, or has no memory for a single sequence.
    """

    def __init__(self, library: Any, file: Path, options: ContextOptions) -> None:
        self._library = library
        self._context: Any = None
        params = library.llama_model_default_params()
        params.n_gpu_layers = 999_999 if options.on_gpu else 0  # more than any model has: all
        self._model = library.llama_model_load_from_file(str(file).encode(), params)
        if not self._model:
            raise _failure("load the model")
        try:
            self.num_sequences = self._take_memory(options)
            self._memory = library.llama_get_memory(self._context)
            self._vocab_size = library.llama_vocab_n_tokens(library.llama_model_get_vocab(self._model))
            self.batch_tokens = int(library.llama_n_batch(self._context))  # that a step takes at most
            self._buffers = _Buffers(library, self.batch_tokens)
        except BaseException:
            self.close()
            raise

    def _take_memory(self, options: ContextOptions) -> int:
        """Make the context; return for how many sequences there was memory."""
        count = options.num_sequences
        while True:
            params = self._params(options, count)
            self._context = self._library.llama_init_from_model(self._model, params)
            if self._context:
                return count
            if count == 1:
                raise _failure("take memory for its KV")
            count = count * 3 // 4

    def _params(self, options: ContextOptions, num_sequences: int) -> Any:
        params = self._library.llama_context_default_params()
        params.n_ctx = num_sequences * options.tokens_per_sequence
        params.n_seq_max = num_sequences
        params.kv_unified = False  # a part for each sequence: attention then reads that alone
        params.n_threads = params.n_threads_batch = options.num_threads
        params.type_k = params.type_v = _TYPES[options.dtype]
        params.offload_kqv = params.op_offload = options.on_gpu
        return params

    def step(self, pieces: Sequence[Piece]) -> NDArray[np.float32]:
        """Compute at most `batch_tokens` tokens.

        Returns:
            Logits `[pieces that want them, vocab]`, valid until the next step.

        Raises:
            RuntimeError: llama.cpp could not.
        """
        library = self._library
        status = library.llama_decode(self._context, self._buffers.filled(pieces))
        if status != 0:
            raise _failure(f"compute a batch (status {status})")
        count = sum(piece.wants_logits for piece in pieces)
        if count == 0:
            return np.empty((0, self._vocab_size), np.float32)
        return np.ctypeslib.as_array(library.llama_get_logits(self._context), (count, self._vocab_size))

    def forget(self, sequence: int) -> None:
        """Free the KV of a sequence."""
        self._library.llama_memory_seq_rm(self._memory, sequence, -1, -1)

    def close(self) -> None:
        """Free the memory; a second call does nothing."""
        if self._context:
            self._library.llama_free(self._context)
        if self._model:
            self._library.llama_model_free(self._model)
        self._context = self._model = None


class _Buffers:
    """The arrays of a llama_batch."""

    def __init__(self, library: Any, size: int) -> None:
        self._tokens, self._positions, self._sequences = (np.zeros(size, np.int32) for _ in range(3))
        self._wants_logits = np.zeros(size, np.int8)
        self._ones = np.ones(size, np.int32)  # sequences that a token belongs to
        first = self._sequences.ctypes.data
        self._pointers = np.arange(first, first + 4 * size, 4, dtype=np.uintp)  # to each element
        fields = dict(library.llama_batch._fields_)
        self._batch = library.llama_batch()
        for name, array in (
            ("token", self._tokens),
            ("pos", self._positions),
            ("n_seq_id", self._ones),
            ("seq_id", self._pointers),
            ("logits", self._wants_logits),
        ):
            setattr(self._batch, name, ctypes.cast(array.ctypes.data, fields[name]))

    def filled(self, pieces: Sequence[Piece]) -> Any:
        """Return the batch with these tokens in it."""
        end = 0
        for piece in pieces:
            begin, end = end, end + len(piece.tokens)
            self._tokens[begin:end] = piece.tokens
            self._positions[begin:end] = range(piece.start, piece.start + len(piece.tokens))
            self._sequences[begin:end] = piece.sequence
            self._wants_logits[begin:end] = 0
            self._wants_logits[end - 1] = piece.wants_logits
        self._batch.n_tokens = end
        return self._batch
