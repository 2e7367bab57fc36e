"""Functions of llama.h over a "model" that writes the alphabet, one token per byte, and ends after "z".

A file that contains the word "damaged" cannot be loaded. A bell (byte 7) breaks an evaluation, and after byte
6 the logits are NaN. `gate` holds evaluations until it is set. The signal with the number in IMITATED_CRASH
ends the evaluating process.
"""

import ctypes
import os
import re
import signal
import threading
from pathlib import Path
from types import SimpleNamespace

llama_token = ctypes.c_int32
LLAMA_TOKEN_ATTR_UNKNOWN, LLAMA_TOKEN_ATTR_NORMAL, LLAMA_TOKEN_ATTR_CONTROL = 1, 4, 8
LLAMA_TOKEN_ATTR_USER_DEFINED, LLAMA_TOKEN_ATTR_LSTRIP, LLAMA_TOKEN_ATTR_RSTRIP = 16, 128, 256
END, BEGIN, SIZE = 256, 257, 258
BELL, NO_NUMBER = 7, 6
NAMES = {END: b"<end>", BEGIN: b"<begin>"}
CONTEXT_TOKENS = 600
METADATA = {b"general.architecture": b"gemma", b"general.sampling.temp": b"0.5"}
TEMPLATE = b"{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}<assistant>"

gate = threading.Event()
gate.set()
decoded: list[list[int]] = []  # the tokens per evaluation
_log = [lambda level, text, data: None]


def llama_log_callback(function):
    return function


def llama_progress_callback(function):
    return function


def llama_log_set(function, data):
    _log[0] = function


def llama_backend_init():
    _log[0](2, b"ready\n", None)


def llama_supports_gpu_offload():
    return False


def llama_model_default_params():
    return SimpleNamespace(vocab_only=False, n_gpu_layers=-1, progress_callback=None)


def llama_model_load_from_file(path, params):
    data = Path(path.decode()).read_bytes()
    if b"damaged" in data:
        _log[0](4, b"llama_model_load: error loading model: the weights are damaged\n", None)
        return None
    for share in (0.5, 1.0):
        if not params.progress_callback(share, None):
            return None
    return SimpleNamespace(size=len(data), has_encoder=b"encoder" in data)


def llama_model_free(model):
    pass


def llama_model_get_vocab(model):
    return model


def llama_vocab_n_tokens(vocab):
    return SIZE


def llama_model_n_ctx_train(model):
    return CONTEXT_TOKENS


def llama_model_size(model):
    return model.size


def llama_model_desc(model, buffer, size):
    buffer.value = b"alphabet 1K (guessed) all F32"
    return len(buffer.value)


def llama_model_n_head(model):
    return 2


def llama_model_n_head_kv(model):
    return 1


def llama_model_n_embd(model):
    return 32


def llama_model_n_layer(model):
    return 3


def llama_model_has_encoder(model):
    return model.has_encoder


def llama_model_has_decoder(model):
    return True


def llama_model_is_diffusion(model):
    return False


def llama_model_chat_template(model, name):
    return TEMPLATE if name is None else None


def llama_model_meta_val_str(model, key, buffer, size):
    if key not in METADATA:
        return -1
    buffer.value = METADATA[key]
    return len(METADATA[key])


def llama_vocab_bos(vocab):
    return BEGIN


def llama_vocab_eos(vocab):
    return END


def llama_vocab_pad(vocab):
    return -1


def llama_vocab_get_text(vocab, token):
    return NAMES.get(token) or bytes([token])


def llama_vocab_get_attr(vocab, token):
    return LLAMA_TOKEN_ATTR_CONTROL if token in NAMES else LLAMA_TOKEN_ATTR_NORMAL


def llama_vocab_is_eog(vocab, token):
    return token == END


def llama_tokenize(vocab, text, length, tokens, size, add_special, parse_special):
    found, text = [BEGIN] * add_special, text[:length]
    for part in re.split(b"(<end>|<begin>)", text) if parse_special else [text]:
        found += [token for token, name in NAMES.items() if name == part] or list(part)
    if len(found) > size:
        return -len(found)
    tokens[: len(found)] = found
    return len(found)


def llama_detokenize(vocab, tokens, count, buffer, size, remove_special, unparse_special):
    return _written(b"".join(_piece(token, unparse_special) for token in tokens[:count]), buffer, size)


def llama_token_to_piece(vocab, token, buffer, size, lstrip, special):
    return _written(_piece(token, special), buffer, size)


def _piece(token, special):
    return bytes([token]) if token < END else NAMES[token] if special else b""


def _written(data, buffer, size):
    if len(data) > size:
        return -len(data)
    buffer[: len(data)] = data
    return len(data)


def llama_context_default_params():
    return SimpleNamespace(n_ctx=512, n_batch=512, n_ubatch=512, n_threads=4, n_threads_batch=4)


def llama_init_from_model(model, params):
    return SimpleNamespace(size=params.n_ctx, batch=params.n_batch, tokens=[])


def llama_free(context):
    pass


def llama_get_memory(context):
    return context


def llama_memory_clear(memory, data):
    memory.tokens.clear()


def llama_memory_seq_rm(memory, sequence, start, end):
    assert (sequence, end) == (0, -1)
    del memory.tokens[start:]
    return True


def llama_batch_get_one(tokens, count):
    return list(tokens[:count])


def llama_decode(context, batch):
    assert gate.wait(60), "an evaluation was held and never let go"
    assert 0 < len(batch) <= context.batch
    decoded.append(batch)
    if number := os.environ.get("IMITATED_CRASH"):
        signal.raise_signal(int(number))
    if BELL in batch:
        _log[0](4, b"decode: error: the bell rang\n", None)
        return -3
    context.tokens += batch
    return 1 if len(context.tokens) > context.size else 0


def llama_get_logits_ith(context, index):
    assert index == -1
    last, logits = context.tokens[-1], (ctypes.c_float * SIZE)()
    logits[END if last == ord("z") else ord("a") + len(context.tokens) % 26] = 20.0
    if last == NO_NUMBER:
        logits[0] = float("nan")
    return ctypes.cast(logits, ctypes.POINTER(ctypes.c_float))
