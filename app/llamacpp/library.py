"""llama.cpp through llama-cpp-python's functions of llama.h: a model, its vocabulary, and a context.

This is the only module that imports llama_cpp, when the first model is opened. What llama.cpp prints becomes
debug messages; exceptions carry its last errors.
"""

import ctypes
import logging
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from neo_desktop.engine.batch import FloatArray
from neo_desktop.engine.progress import Progress
from neo_desktop.models.json_file import ModelError

logger = logging.getLogger(__name__)

MAX_TEXT_BYTES = 1 << 16  # of an entry of the metadata
_WARNING, _ERROR = 3, 4  # levels of ggml's log
_errors: deque[str] = deque(maxlen=3)  # that llama.cpp logged last
_LEVELS = {_WARNING: logging.INFO, _ERROR: logging.INFO}  # what it warns of is rarely for people


@cache
def _api() -> Any:
    from llama_cpp import llama_cpp as api

    @api.llama_log_callback  # type: ignore[untyped-decorator]
    def log(level: int, text: bytes, _: object) -> None:
        line = text.decode(errors="replace").rstrip()
        if level == _ERROR:
            _errors.append(line)
        if line.strip("."):
            logger.log(_LEVELS.get(level, logging.DEBUG), "llama.cpp: %s", line)

    api.neo_desktop_log = log  # it must live as long as the library
    api.llama_log_set(log, None)
    api.llama_backend_init()
    return api


def supports_gpu() -> bool:
    """True if llama-cpp-python was built for a GPU, and finds one."""
    return bool(_api().llama_supports_gpu_offload())


class LlamaModel:
    """A loaded model, or its vocabulary alone. Any thread may ask for tokens and texts.

    `progress` may raise, which ends the loading. Raises ModelError: llama.cpp cannot load it.
    """

    def __init__(
        self,
        file: Path,
        *,
        vocabulary_only: bool = False,
        gpu: bool = False,
        progress: Progress | None = None,
    ) -> None:
        api = self._api = _api()
        stopped: list[BaseException] = []

        def on_progress(share: float, _: object) -> bool:
            try:
                if progress is not None:
                    progress(share, "Loading weights")
            except BaseException as error:  # raised again below
                stopped.append(error)
            return not stopped

        params = api.llama_model_default_params()
        params.vocab_only = vocabulary_only
        params.n_gpu_layers = -1 if gpu else 0
        params.progress_callback = callback = api.llama_progress_callback(on_progress)
        _errors.clear()
        self.file = file
        self.handle = api.llama_model_load_from_file(bytes(file), params)
        del callback
        if stopped:
            raise stopped[0]
        if self.handle is None:
            raise ModelError(f"llama.cpp cannot load {file}: {_why()}.")
        self.close = weakref.finalize(self, api.llama_model_free, self.handle)
        self._vocabulary = api.llama_model_get_vocab(self.handle)
        self.num_tokens: int = api.llama_vocab_n_tokens(self._vocabulary)
        self.trained_tokens: int = api.llama_model_n_ctx_train(self.handle)
        self.nbytes: int = api.llama_model_size(self.handle)

    @property
    def stored_as(self) -> str:
        """The type of most weights, in llama.cpp's words: "Q4_K - Medium"."""
        buffer = ctypes.create_string_buffer(256)
        self._api.llama_model_desc(self.handle, buffer, len(buffer))
        _architecture, _size, *kind = buffer.value.decode(errors="replace").split(" ")
        return " ".join(kind).removeprefix("(guessed) ")

    @property
    def kv_bytes_per_token(self) -> int:
        """At most: some models have layers with less."""
        api, model = self._api, self.handle
        heads = max(api.llama_model_n_head(model), 1)
        dim = int(self.metadata(f"{self.metadata('general.architecture')}.attention.key_length") or 0)
        dim = dim or api.llama_model_n_embd(model) // heads
        numbers = 2 * api.llama_model_n_layer(model) * max(api.llama_model_n_head_kv(model), 1) * dim
        return 2 * int(numbers)  # in float16

    @property
    def why_unusable(self) -> str | None:
        """Why it cannot write answers; None: it can."""
        if self._api.llama_model_has_encoder(self.handle):
            return "it has an encoder"
        if not self._api.llama_model_has_decoder(self.handle):
            return "it has no decoder"
        return "it is a diffusion model" if self._api.llama_model_is_diffusion(self.handle) else None

    def chat_template(self, name: str | None = None) -> str | None:
        """Return Jinja source: of the template with a name, or of the model's main one."""
        encoded = None if name is None else name.encode()
        template = self._api.llama_model_chat_template(self.handle, encoded)
        return None if template is None else template.decode(errors="replace")

    def metadata(self, key: str) -> str | None:
        buffer = ctypes.create_string_buffer(MAX_TEXT_BYTES)
        size = self._api.llama_model_meta_val_str(self.handle, key.encode(), buffer, len(buffer))
        return None if size < 0 else buffer.value.decode(errors="replace")

    def role_token(self, role: str) -> int | None:
        """Return the token for "bos", "eos" or "pad"; None: there is none."""
        token = getattr(self._api, f"llama_vocab_{role}")(self._vocabulary)
        return int(token) if 0 <= token < self.num_tokens else None

    def token_name(self, token_id: int) -> str:
        text: bytes = self._api.llama_vocab_get_text(self._vocabulary, token_id)
        return text.decode(errors="replace")

    def tokens_with(self, *attributes: str) -> frozenset[int]:
        """Return the tokens with one of these attributes, in the words of llama.h: "CONTROL"."""
        api, vocabulary = self._api, self._vocabulary
        mask = sum(getattr(api, f"LLAMA_TOKEN_ATTR_{name}") for name in attributes)  # a bit each
        tokens = range(self.num_tokens)
        return frozenset(i for i in tokens if api.llama_vocab_get_attr(vocabulary, i) & mask)

    def end_tokens(self) -> tuple[int, ...]:
        """Return the tokens that end an answer, the one that the file names first."""
        eos = self.role_token("eos")
        ends = [i for i in range(self.num_tokens) if self._api.llama_vocab_is_eog(self._vocabulary, i)]
        return tuple(dict.fromkeys(([] if eos is None else [eos]) + ends))

    def tokenise(self, text: bytes, *, add_special: bool, parse_special: bool = True) -> list[int]:
        """Return the tokens of a text in UTF-8.

        `add_special`: put the tokens around it that the vocabulary wants. `parse_special`: recognise control
        tokens that are written out.
        """

        def into(found: Any, size: int) -> int:
            arguments = self._vocabulary, text, len(text), found, size, add_special, parse_special
            return int(self._api.llama_tokenize(*arguments))

        size = len(text) + 2  # with those at both ends
        return list(_filled(lambda size: (self._api.llama_token * size)(), into, size))

    def text(self, token_ids: Sequence[int], *, with_special: bool) -> bytes:
        count, tokens = len(token_ids), (self._api.llama_token * len(token_ids))(*token_ids)

        def into(found: Any, size: int) -> int:
            arguments = self._vocabulary, tokens, count, found, size, False, with_special
            return int(self._api.llama_detokenize(*arguments))

        return bytes(_filled(ctypes.create_string_buffer, into, 16 * count + 64))

    def piece(self, token_id: int) -> bytes:
        def into(found: Any, size: int) -> int:
            return int(self._api.llama_token_to_piece(self._vocabulary, token_id, found, size, 0, True))

        return bytes(_filled(ctypes.create_string_buffer, into, 64))


def _filled(make: Callable[[int], Any], into: Callable[[Any, int], int], size: int) -> Any:
    """Return what llama.cpp writes into an array; where that is too small, it tells the size."""
    for _ in range(2):
        found = make(size)
        count = into(found, size)
        if count >= 0:
            return found[:count]
        size = -count
    raise ValueError("llama.cpp cannot translate between this text and tokens")


class LlamaContext:
    """One sequence of at most `num_tokens` tokens with its KV. One thread makes the calls.

    Raises MemoryError: it does not fit.
    """

    def __init__(self, model: LlamaModel, num_tokens: int, batch_tokens: int, num_threads: int) -> None:
        api = self._api = _api()
        params = api.llama_context_default_params()
        params.n_ctx = num_tokens
        params.n_batch = params.n_ubatch = batch_tokens
        params.n_threads = params.n_threads_batch = num_threads
        _errors.clear()
        self._model = model  # which must live as long
        self._handle = api.llama_init_from_model(model.handle, params)
        if self._handle is None:
            raise MemoryError(
                f"llama.cpp makes no context of {num_tokens} tokens: {_why()}. Try fewer: --cpu-cache-tokens"
            )
        self.close = weakref.finalize(self, api.llama_free, self._handle)
        self._memory = api.llama_get_memory(self._handle)
        self.num_held = 0  # tokens with KV

    def truncate(self, num_tokens: int) -> int:
        """Forget the KV after `num_tokens` tokens; return how many are left, if not all could be kept."""
        if num_tokens < self.num_held:
            if not num_tokens or not self._api.llama_memory_seq_rm(self._memory, 0, num_tokens, -1):
                num_tokens = 0
                self._api.llama_memory_clear(self._memory, True)
            self.num_held = num_tokens
        return self.num_held

    def evaluate(self, token_ids: Sequence[int]) -> FloatArray:
        """Add tokens, not more than a batch has; return the logits after the last one, [vocab].

        RuntimeError: llama.cpp failed; nothing is held any more.
        """
        tokens = (self._api.llama_token * len(token_ids))(*token_ids)
        _errors.clear()
        status = self._api.llama_decode(self._handle, self._api.llama_batch_get_one(tokens, len(tokens)))
        if status:
            self.num_held = len(token_ids)
            self.truncate(0)
            raise RuntimeError(f"llama.cpp could not go on (status {status}): {_why()}")
        self.num_held += len(token_ids)
        logits = self._api.llama_get_logits_ith(self._handle, -1)
        return np.ctypeslib.as_array(logits, (self._model.num_tokens,)).astype(np.float32)


def _why() -> str:
    """The first of its last errors, without the function that it comes from."""
    return _errors[0].partition(": ")[2].rstrip(".") if _errors else "it does not say why"
