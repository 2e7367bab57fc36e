"""The quantisation settings of config.json. Tensor names tell which weights are quantised."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from neo_desktop.models.json_file import JsonFile, ModelError


class Layout(Enum):
    """Layout of packed tensors; see `packed`."""

    AWQ = "AWQ"
    GPTQ = "GPTQ"
    COMPRESSED = "compressed-tensors"


@dataclass(frozen=True, slots=True)
class Packed:
    """Matrices of integers: (number - zero) * scale."""

    layout: Layout
    bits: int  # per number: 4 or 8
    group_size: int | None  # consecutive columns of a row that share zero and scale; None: the whole row
    is_symmetric: bool  # all zeros are half of 2^bits
    is_reordered: bool = False  # a separate tensor assigns columns to groups
    stored_zero_offset: int = 0  # effective zero minus stored zero

    @property
    def is_upright(self) -> bool:
        """True if tensors have the matrix's rows first; False: its columns."""
        return self.layout is Layout.COMPRESSED

    @property
    def type_name(self) -> str:
        """Name for users."""
        group = f", group {self.group_size}" if self.group_size else ""
        return f"{self.layout.value} {self.bits}-bit{group}{', reordered' if self.is_reordered else ''}"


@dataclass(frozen=True, slots=True)
class Scaled:
    """Matrices of 8-bit floats or integers: number * scale."""

    block: tuple[int, int] | None = None  # rows and columns per scale; None: one row, or the matrix


Scheme = Packed | Scaled
_OF_MLX = frozenset(("group_size", "bits", "mode"))  # all its keys, except those for single modules


def read_scheme(file: JsonFile, *, has_experts_in_one: bool) -> Scheme | None:
    """Read `quantization_config` of config.json; None: no weights are quantised, except gpt-oss's experts.

    Args:
        has_experts_in_one: see `Family`; only these tensors are stored in MXFP4.

    Raises ModelError for unsupported schemes and for invalid values.
    """
    section = file.section("quantization_config") or file.section("compression_config")
    if section is None:
        return None
    readers: dict[str, Callable[[JsonFile], Scheme | None]] = {
        "awq": _awq,
        "gptq": _gptq,
        "fp8": _fp8,
        "fbgemm_fp8": lambda _: Scaled(),
        "compressed-tensors": _compressed_tensors,
        **({"mxfp4": lambda _: None} if has_experts_in_one else {}),
    }
    if "quant_method" not in section and {"group_size", "bits"} <= section.values.keys() <= _OF_MLX:
        raise _unsupported(section, "MLX")
    # GPTQModel writes both names, and deprecates the first.
    name = "method" if section.raw("quant_method") is None and "method" in section else "quant_method"
    method = section.text(name, "compressed-tensors" if "config_groups" in section else None)
    if method not in readers:
        raise _unsupported(section, repr(method))
    return readers[method](section)


def _unsupported(section: JsonFile, what: str) -> ModelError:
    shown = what if len(what) <= 100 else f"{what[:100]}…"
    return ModelError(
        f"{section.path} describes weights quantised by {shown}, which is not supported: choose a version of "
        "this model in AWQ, GPTQ or FP8, a GGUF file, or the original float16 or bfloat16 one."
    )


def _awq(section: JsonFile) -> Packed:
    bits = section.integer("bits", section.raw("w_bit") or 4)
    kind = _kind(section, "gemm")
    if bits != 4 or kind != "gemm":
        raise _unsupported(section, f"'awq' to {bits} bits in the format {kind!r}")
    group_size = _group_size(section, section.raw("q_group_size") or 128)
    return Packed(Layout.AWQ, bits, group_size, is_symmetric=False)


def _gptq(section: JsonFile) -> Packed:
    bits = section.integer("bits")
    kind = "marlin" if section.boolean("is_marlin_format", False) else _kind(section, "gptq")
    if bits not in (4, 8) or kind not in ("gptq", "gptq_v2"):
        raise _unsupported(section, f"'gptq' to {bits} bits in the format {kind!r}")
    group_size = _group_size(section)
    return Packed(
        Layout.GPTQ,
        bits,
        group_size,
        is_symmetric=section.boolean("sym", False),
        is_reordered=group_size is not None and section.boolean("desc_act", False),
        stored_zero_offset=int(kind == "gptq"),
    )


def _fp8(section: JsonFile) -> Scaled:
    kind = section.text("fmt", "e4m3")
    if kind.lower() not in ("e4m3", "float8_e4m3fn"):
        raise _unsupported(section, f"'fp8' in the format {kind!r}")
    return Scaled(_block(section, "weight_block_size"))


def _compressed_tensors(section: JsonFile) -> Scheme:
    kind, weights = section.text("format"), _weights_of_groups(section)
    bits, numbers = weights.integer("num_bits"), weights.text("type", "int")
    strategy, is_symmetric = weights.text("strategy", "tensor"), weights.boolean("symmetric", True)
    status = section.text("quantization_status", "compressed")
    if status != "compressed" or _has(section, "sparsity_config", "format", ("dense", None)):
        raise _unsupported(section, "'compressed-tensors', sparse or not compressed")
    if _has(section, "transform_config", "config_groups", ({}, None)):
        raise _unsupported(section, "'compressed-tensors' with matrices that were rotated")
    if kind == "pack-quantized" and numbers == "int" and bits in (4, 8) and strategy in ("group", "channel"):
        group_size = _group_size(weights) if strategy == "group" else None
        is_reordered = group_size is not None and weights.raw("actorder") in ("group", "dynamic", True)
        return Packed(Layout.COMPRESSED, bits, group_size, is_symmetric, is_reordered)
    block = _block(weights, "block_structure") if strategy == "block" else None
    kinds = {"float": ("float-quantized", "naive-quantized"), "int": ("int-quantized", "naive-quantized")}
    is_known = bits == 8 and kind in kinds.get(numbers, ()) and is_symmetric
    if not is_known or strategy not in ("tensor", "channel", "block"):
        what = f"'compressed-tensors' in the format {kind!r}, {bits} bits ({numbers}) for each {strategy}"
        raise _unsupported(section, what)
    return Scaled(block)


def _weights_of_groups(section: JsonFile) -> JsonFile:
    """Return the common settings of the groups of modules. Raise ModelError if they differ."""
    groups = section.section("config_groups")
    if groups is None or not groups.values:
        raise ModelError(f"{section.path} lacks 'config_groups': the file is incomplete, download it again.")
    found: list[JsonFile] = []
    for name in groups.values:
        group = groups.section(name)
        weights = None if group is None else group.section("weights")
        if weights is None or (found and weights.values != found[0].values):
            raise _unsupported(section, "'compressed-tensors' in several ways, or its inputs alone")
        found.append(weights)
    return found[0]


def _has(section: JsonFile, name: str, key: str, nothing: tuple[object, ...]) -> bool:
    part = section.section(name)
    return part is not None and part.raw(key) not in nothing


def _kind(section: JsonFile, default: str) -> str:
    """Return the format within a method; its key has had several names."""
    for name in ("version", "checkpoint_format", "format"):
        if section.raw(name) is not None:
            return section.text(name).lower()
    return default


def _group_size(section: JsonFile, default: int | None = None) -> int | None:
    size = section.integer("group_size", default, minimum=-1)
    if size == 0:
        raise ModelError(f"{section.path} has 'group_size' = 0, which is invalid: correct the file.")
    return None if size == -1 else size


def _block(section: JsonFile, key: str) -> tuple[int, int] | None:
    sizes = section.raw(key)
    match sizes:
        case None:
            return None
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return rows, columns
    raise ModelError(f"{section.path} needs a {key} of two numbers above zero: correct the file.")
