"""The GGUF format: metadata and tensor locations, checked against the file's size.

    "GGUF"  version u32  tensors u64  entries u64
    entries: key, type u32, value        strings: length u64, UTF-8        arrays: type u32, count u64, values
    tensors: name, dimensions u32, sizes u64..., type u32, offset u64
    padding up to a multiple of the alignment, then the tensor data: offsets count from here

All numbers are little-endian. No allocation exceeds the file's size; arrays stay in the file until they are
requested.
"""

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from neo_desktop.models.gguf.types import TYPES, StoredType
from neo_desktop.models.json_file import ModelError, UnsupportedModelError, check_size
from neo_desktop.models.missing import why_no_model
from neo_desktop.models.read_ahead import ReadAhead

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_ENTRIES = 2**16
MAX_KEY_BYTES = 2**16 - 1
MAX_NAME_BYTES = 256  # llama.cpp takes 63
MAX_DIMENSIONS = 4
MAX_ALIGNMENT = 2**16
_DEFAULT_ALIGNMENT = 32
_UINT32, _BOOL, _STRING, _ARRAY = 4, 7, 8, 9
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Location, type and shape of one tensor in the file."""

    name: str
    type: StoredType
    shape: tuple[int, ...]  # rows first, as torch has it
    offset: int  # bytes from the start of the file
    nbytes: int


@dataclass(frozen=True, slots=True)
class NumberArray:
    """An array of numbers, still in the file."""

    data: NDArray[np.generic]

    def __len__(self) -> int:
        return len(self.data)


@dataclass(frozen=True, slots=True)
class StringArray:
    """An array of strings, still in the file."""

    path: Path
    key: str
    data: mmap.mmap
    position: int
    count: int

    def texts(self) -> list[str]:
        """Return the strings. Raise ModelError for invalid UTF-8."""
        texts = []
        position, length_of = self.position, struct.Struct("<Q").unpack_from
        for index in range(self.count):
            start = position + 8
            position = start + length_of(self.data, position)[0]
            try:
                texts.append(self.data[start:position].decode())
            except UnicodeDecodeError:
                raise ModelError(
                    f"{self.path} is damaged ({self.key} has something that is not text at {index}): "
                    "download it again."
                ) from None
        return texts


Value = int | float | str | NumberArray | StringArray


class GGUFFile:
    """A memory-mapped GGUF file; the mapping lives as long as this object.

    Raises ModelError for a file of another format, a damaged file and a malicious one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._bytes = _mapped(path)
        reader = _Reader(path, self._bytes)
        if not MAGIC.startswith(self._bytes[: len(MAGIC)]):
            raise ModelError(f"{why_no_model(path)}.")
        reader.take(len(MAGIC))
        version = reader.integer("I")
        if version not in VERSIONS:
            big_endian = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
            what = "is a big-endian GGUF file" if big_endian else f"is a GGUF file of version {version}"
            raise ModelError(f"{path} {what}, which is not supported: choose a newer file of this model.")
        num_tensors, num_entries = reader.integer("Q"), reader.integer("Q")
        reader.expect_items(num_entries, MAX_ENTRIES, 13, "entries of metadata")
        self.metadata: dict[str, Value] = {}
        for _ in range(num_entries):
            key = reader.text(MAX_KEY_BYTES, "the name of an entry")
            if key in self.metadata:
                raise reader.damaged(f"the entry {key!r} twice")
            self.metadata[key] = reader.value(key)
        reader.expect_items(num_tensors, MAX_ENTRIES, 25, "tensors")
        places = [reader.tensor() for _ in range(num_tensors)]
        self.tensors = self._placed(reader, places)
        self.read_ahead = ReadAhead(path)

    def raw(self, place: TensorPlace) -> NDArray[np.uint8]:
        return np.frombuffer(self._bytes, np.uint8, place.nbytes, place.offset)

    def _alignment(self, reader: "_Reader") -> int:
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or not 0 < alignment <= MAX_ALIGNMENT or alignment.bit_count() != 1:
            raise reader.damaged(f"an alignment of {str(alignment)[:40]}")
        return alignment

    def _placed(self, reader: "_Reader", places: list[TensorPlace]) -> dict[str, TensorPlace]:
        """Check that tensors are aligned, disjoint and within the file; return them by name."""
        alignment = self._alignment(reader)
        tensors: dict[str, TensorPlace] = {}
        start = end = -(-reader.position // alignment) * alignment
        for place in sorted(places, key=lambda place: place.offset):
            offset = start + place.offset
            if place.name in tensors:
                raise reader.damaged(f"the tensor {place.name!r} twice")
            if place.offset % alignment:
                raise reader.damaged(f"{place.name!r} at {place.offset}, not a multiple of {alignment}")
            if offset < end:
                raise reader.damaged(f"{place.name!r} in the place of another tensor")
            end = offset + place.nbytes
            if end > len(self._bytes):
                raise ModelError(
                    f"{self.path} is truncated: {place.name} ends at byte {end}, the file at "
                    f"{len(self._bytes)}. Download it again."
                )
            tensors[place.name] = TensorPlace(place.name, place.type, place.shape, offset, place.nbytes)
        return tensors


class _Reader:
    """Reads forward and never past the end of the file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.position = 0
        self._data = data

    def damaged(self, what: str) -> ModelError:
        """Return an error that describes the damage: "it has `what`"."""
        shown = what if len(what) <= 300 else f"{what[:300]}…"
        return ModelError(f"{self.path} is damaged (it has {shown}): download it again.")

    def take(self, count: int) -> bytes:
        self._expect(count)
        self.position += count
        return self._data[self.position - count : self.position]

    def integer(self, code: str) -> int:
        return int(self._number(code))

    def text(self, most: int | None, what: str) -> str:
        length = self.integer("Q")
        if most is not None and length > most:
            raise self.damaged(f"{what} with {length} bytes")
        try:
            return self.take(length).decode()
        except UnicodeDecodeError:
            raise self.damaged(f"{what} that is not text") from None

    def expect_items(self, count: int, most: int, least_bytes: int, what: str) -> None:
        """Raise ModelError if `count` exceeds `most`, or the items cannot fit into the rest of the file."""
        if count > most or count * least_bytes > len(self._data) - self.position:
            raise self.damaged(f"{count} {what} in {len(self._data)} bytes")

    def value(self, key: str) -> Value:
        kind = self.integer("I")
        if kind == _ARRAY:
            return self._array(key)
        if kind == _STRING:
            return self.text(None, f"a value of {key!r}")
        if kind == _BOOL:
            value = self.integer("B")
            if value > 1:
                raise self.damaged(f"{value} as {key!r}, which is true or false")
            return value == 1
        if kind not in _NUMBERS:
            raise self.damaged(f"a value of the unknown type {kind} as {key!r}")
        return self._number(_NUMBERS[kind])

    def tensor(self) -> TensorPlace:
        """Read the description of a tensor; its offset is still relative."""
        name = self.text(MAX_NAME_BYTES, "the name of a tensor")
        dimensions = self.integer("I")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise self.damaged(f"{name!r} with {dimensions} dimensions")
        shape = tuple(self.integer("Q") for _ in range(dimensions))[::-1]
        kind, offset = self.integer("I"), self.integer("Q")
        if kind not in TYPES:
            raise UnsupportedModelError(
                f"{name} in {self.path} has a type that is not supported ({kind}): choose a "
                f"file with {', '.join(stored.name for stored in TYPES.values())}."
            )
        stored = TYPES[kind]
        elements = prod(shape)
        if min(shape) == 0 or elements >= 2**48:
            raise self.damaged(f"{name!r} with the shape {list(shape)}")
        if shape[-1] % stored.elements:
            raise self.damaged(f"{name!r} with rows of {shape[-1]}, which {stored.name} cannot have")
        return TensorPlace(name, stored, shape, offset, elements // stored.elements * stored.nbytes)

    def _array(self, key: str) -> Value:
        kind, count = self.integer("I"), self.integer("Q")
        if kind == _STRING:
            return self._strings(key, count)
        if kind == _BOOL or kind in _NUMBERS:
            code = "<" + _NUMBERS.get(kind, "B")
            self._expect(count * struct.calcsize(code))
            data = np.frombuffer(self._data, code, count, self.position)
            self.position += data.nbytes
            return NumberArray(data)
        raise self.damaged(f"an array of the type {kind} as {key!r}")

    def _strings(self, key: str, count: int) -> StringArray:
        self._expect(8 * count)
        strings = StringArray(self.path, key, self._data, self.position, count)
        position, end = self.position, len(self._data)
        length_of = struct.Struct("<Q").unpack_from
        for _ in range(count):
            if position + 8 > end:
                raise self._truncated()
            position += 8 + length_of(self._data, position)[0]
        self._expect(position - self.position)
        self.position = position
        return strings

    def _number(self, code: str) -> int | float:
        value: int | float
        (value,) = struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))
        return value

    def _expect(self, count: int) -> None:
        if count > len(self._data) - self.position:
            raise self._truncated()

    def _truncated(self) -> ModelError:
        return ModelError(
            f"{self.path} is truncated or damaged (its description goes beyond its {len(self._data)} bytes): "
            "download it again."
        )


def _mapped(path: Path) -> mmap.mmap:
    check_size(path)
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError:
        raise ModelError(f"{path} is empty: download it again.") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error.strerror}): check the file.") from None
