"""JSON of a checkpoint folder, read with errors that name the file and the key."""

import json
from pathlib import Path
from typing import Any


class ModelError(ValueError):
    """A checkpoint that cannot be used: one sentence that says what is wrong and what to do."""


def read_text(path: Path) -> str:
    """The text of a file of a checkpoint; ModelError where it is missing or not UTF-8."""
    try:
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
    """One JSON object with typed reads; `null` and a missing key both give the default.

    Every read raises ModelError for a value of the wrong kind, and for a missing key without default.
    """

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self.path = path
        self.values = values

    @classmethod
    def read(cls, path: Path) -> "JsonFile":
        """Parse the file; ModelError where it is missing, not JSON, or not an object."""
        try:
            values = json.loads(read_text(path))
        except (json.JSONDecodeError, RecursionError) as error:
            raise ModelError(f"{path} is not valid JSON ({error}): download the file again.") from None
        if not isinstance(values, dict):
            raise ModelError(f"{path} holds no JSON object: download the file again.")
        return cls(path, values)

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def raw(self, key: str) -> Any:
        """The value as it stands, None where the key is missing."""
        return self.values.get(key)

    def integer(self, key: str, default: int | None = None, minimum: int = 1) -> int:
        """An integer from `minimum` to 2**31 - 1."""
        value = self._present(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value < 2**31:
            raise self._wrong(key, f"an integer from {minimum} to {2**31 - 1}")
        return value

    def number(self, key: str, default: float | None = None, *, allow_zero: bool = False) -> float:
        """A finite number above zero, or zero where that is allowed."""
        value = self._present(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < float("inf"):
            raise self._wrong(key, "a number above zero")
        if value == 0 and not allow_zero:
            raise self._wrong(key, "a number above zero")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self._present(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        value = self._present(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, "a string")
        return value

    def section(self, key: str) -> "JsonFile | None":
        """The object under the key, None where there is none."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self._wrong(key, "an object")
        return JsonFile(self.path, value)

    def token_ids(self, key: str, default: tuple[int, ...]) -> tuple[int, ...]:
        """One token id or a list of them; `null` means none."""
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
        return ModelError(
            f"{self.path} has {key!r} = {self.values[key]!r}, which is not {wanted}: correct the file."
        )
