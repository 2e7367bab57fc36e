"""JSON files of a checkpoint; errors name the file and the key."""

import json
import sys
from pathlib import Path
from typing import Any

MAX_FILE_BYTES = 8 << 20  # tokenizer_config.json may name thousands of tokens; others have kilobytes
LARGEST_NUMBER, SMALLEST_NUMBER = 1e12, 1e-20  # of floats


MAX_REASON = 1000  # characters


class ModelError(ValueError):
    """An unusable checkpoint. The message is one sentence: the problem, and the remedy.

    A sentence may quote a file at any length; the middle of a long one is cut.
    """

    def __init__(self, reason: str) -> None:
        if len(reason) > MAX_REASON:
            reason = f"{reason[: MAX_REASON - 250]} … {reason[-200:]}"
        super().__init__(reason)


INSTALL_LLAMACPP = f"{sys.executable} -m pip install 'neo-desktop[llamacpp]'"


class UnsupportedModelError(ModelError):
    """A GGUF file that may be valid, but needs features that the engine lacks; llama.cpp may run it."""

    def __str__(self) -> str:
        return f"{super().__str__()} With llama.cpp it may run: {INSTALL_LLAMACPP}."


INSTALL_TRANSFORMERS = f"{sys.executable} -m pip install 'neo-desktop[transformers]'"


class NotWrittenError(ModelError):
    """A config.json that needs features of transformers' code that the project's decoder lacks."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.reason} With transformers it may run: {INSTALL_TRANSFORMERS}."


def check_size(path: Path, max_bytes: int | None = None) -> None:
    """Raise ModelError for a file that is too large or not a regular file; a missing file passes."""
    if not path.exists():
        return
    if not path.is_file():
        raise ModelError(f"{path} is not a regular file: download the model again.")
    size_bytes = path.stat().st_size
    if max_bytes is not None and size_bytes > max_bytes:
        raise ModelError(
            f"{path} has {size_bytes} bytes, more than the {max_bytes} that are allowed: download it again."
        )


def read_text(path: Path, max_bytes: int = MAX_FILE_BYTES) -> str:
    """Return the text of a checkpoint's file. Raise ModelError if it is missing, not UTF-8, or too large."""
    try:
        check_size(path, max_bytes)
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ModelError(
            f"{path.parent} has no {path.name}: point at a Hugging Face model folder "
            "(config.json, tokenizer.json, *.safetensors) and complete the download."
        ) from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error.strerror}): check its permissions.") from None
    except UnicodeDecodeError as error:
        raise ModelError(f"{path} is not text ({error}): download the file again.") from None


class JsonFile:
    """A JSON object with typed reads; `null` and a missing key both give the default.

    Every read raises ModelError for a value of the wrong type, and for a missing key without default.
    """

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self.path = path
        self.values = values

    @classmethod
    def read(cls, path: Path, max_bytes: int = MAX_FILE_BYTES) -> "JsonFile":
        """Parse the file. Raise ModelError if it is missing, not a JSON object, or too large."""
        text = read_text(path, max_bytes)
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:  # ValueError also for integers with thousands of digits
            raise ModelError(f"{path} is not valid JSON ({error}): download the file again.") from None
        if not isinstance(values, dict):
            raise ModelError(f"{path} is not a JSON object: download the file again.")
        return cls(path, values)

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def raw(self, key: str) -> Any:
        return self.values.get(key)

    def integer(
        self, key: str, default: int | None = None, minimum: int = 1, maximum: int = 2**31 - 1
    ) -> int:
        value = self._present(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= maximum:
            raise self._wrong(key, f"an integer from {minimum} to {maximum}")
        return value

    def number(self, key: str, default: float | None = None, *, allow_zero: bool = False) -> float:
        """Return a finite number above zero, or zero if allowed."""
        value = self._present(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self._wrong(key, "a number above zero")
        if value == 0 and allow_zero:
            return 0.0
        if not SMALLEST_NUMBER <= value <= LARGEST_NUMBER:
            raise self._wrong(key, f"a number above zero, up to {LARGEST_NUMBER:g}")
        return float(value)

    def boolean(self, key: str, default: bool | None = None) -> bool:
        value = self._present(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._present(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, "a string")
        return value

    def section(self, key: str) -> "JsonFile | None":
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self._wrong(key, "an object")
        return JsonFile(self.path, value)

    def token_ids(self, key: str, default: tuple[int, ...]) -> tuple[int, ...]:
        """Return one or several token ids as a tuple; empty for `null`."""
        if key not in self.values:
            return default
        value = self.values[key]
        if value is None:
            return ()
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in ids):
            raise self._wrong(key, "a token id or a list of token ids")
        return tuple(ids)

    def _present(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        value = default if value is None else value
        if value is None:
            raise ModelError(f"{self.path} lacks {key!r}: the file is incomplete, download it again.")
        return value

    def _wrong(self, key: str, wanted: str) -> ModelError:
        value = repr(self.values.get(key))
        shown = value if len(value) <= 100 else f"{value[:100]}…"
        return ModelError(f"{self.path} has {key!r} = {shown}, which is not {wanted}: correct the file.")
