"""The weight format that keeps a checkpoint's quantised matrices, on a CPU and on a GPU."""

from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace

import torch

from neo_desktop import native
from neo_desktop.models.config import ModelConfig
from neo_desktop.models.gguf.types import BY_NAME
from neo_desktop.models.linear import grouped, quantised
from neo_desktop.models.linear.dense import Dense
from neo_desktop.models.linear.offloaded import OffloadedFormat
from neo_desktop.models.linear.packed import Room
from neo_desktop.models.linear.protocol import Linear, WeightFormat
from neo_desktop.models.linear.quantised import PartShape, Quantised
from neo_desktop.models.linear.quantised_gpu import Kernels, QuantisedOnGPU, merged
from neo_desktop.models.matrices import OF_HEADS
from neo_desktop.models.stored_tensor import FLOATS
from neo_desktop.models.weights import Weights


@dataclass(frozen=True, slots=True)
class StoredForm(Dense):
    """A `protocol.WeightFormat`: matrices stay packed if their types have kernels; others are dequantised.

    Args:
        stored: matrix name (see `WeightFormat.named`) -> parts, of matrices with at least one quantised part.
        kernels: of a GPU; None: for a CPU.
    """

    stored: Mapping[str, tuple[PartShape, ...]] = field(default_factory=dict)
    kernels: Kernels | None = None
    name: str = ""

    def on_gpu(self, kernels: Kernels, tables: Room | None = None) -> "StoredForm":
        return replace(self, kernels=kernels, tables=tables)

    def named(self, name: str) -> "StoredForm":
        return replace(self, name=name)

    def of_rows(self, rows: slice) -> "StoredForm":
        parts, first = [], 0
        for part in self.parts:  # none if the whole matrix is dequantised
            count = min(rows.stop - first, part.rows) - max(rows.start - first, 0)
            parts += [PartShape(part.type_name, count)] if count > 0 else []
            first += part.rows
        return replace(self, stored={self.name: tuple(parts)})

    @property
    def parts(self) -> tuple[PartShape, ...]:
        """Parts of the selected matrix; empty: it is dequantised."""
        parts = self.stored.get(self.name, ())
        if self.kernels is not None and (
            self.name.endswith(OF_HEADS) or ("experts_" in self.name and len(merged(parts)) > 1)
        ):
            return ()  # kernels do not index heads, and a layer's experts only in one matrix
        return parts if all(part.type_name in quantised.KERNEL_TYPES for part in parts) else ()

    @property
    def kept_types(self) -> Set[str]:
        return {part.type_name for name in self.stored for part in self.named(name).parts}

    @property
    def widened(self) -> Mapping[str, int]:
        """Types that take more bits in memory than in the file -> bits in memory."""
        if self.kernels is not None:
            return {}
        return {name: bits for name, bits in quantised.WIDENED.items() if name in self.kept_types}

    @property
    def without_kernel(self) -> tuple[str, ...]:
        """Quantised types that are dequantised; a fused matrix is dequantised as a whole."""
        dequantised = [parts for name, parts in self.stored.items() if not self.named(name).parts]
        return tuple(sorted({part.type_name for parts in dequantised for part in parts}.difference(FLOATS)))

    def empty(
        self, rows: int, columns: int, *, has_bias: bool, dtype: torch.dtype, device: torch.device
    ) -> Linear:
        if not self.parts:
            return Dense.empty(self, rows, columns, has_bias=has_bias, dtype=dtype, device=device)
        bias = torch.empty(rows, dtype=dtype, device=device) if has_bias else None
        if self.kernels is None:
            return Quantised(self.parts, columns, bias, dtype, self.room)
        is_stacked = "experts_" in self.name
        kernels = self.kernels
        return QuantisedOnGPU(self.parts, columns, bias, dtype, device, kernels, is_stacked=is_stacked)

    def table(self, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Linear:
        if self.tables is None or self.kernels is None or not self.parts:
            return Dense.table(self, rows, columns, dtype, device)
        return QuantisedOnGPU(self.parts, columns, None, dtype, device, self.kernels, table_room=self.tables)

    def nbytes(self, rows: int, columns: int, dtype: torch.dtype) -> int:
        if not self.parts:
            return Dense.nbytes(self, rows, columns, dtype)
        if self.kernels is None:
            return sum(native.packed_bytes(part.type_name, part.rows, columns) for part in self.parts)
        return sum(grouped.packed_bytes(part.type_name, part.rows, columns) for part in merged(self.parts))

    def loading_bytes(self, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> int:
        if not self.parts:
            return Dense.loading_bytes(self, rows, columns, dtype, device)
        return 0 if self.kernels is None else grouped.LOADING_BYTES


def what_becomes(form: WeightFormat, dtype: torch.dtype) -> str:
    """Describe a format's treatment of quantised matrices: "Q3_K in 6 bits, others kept as they are"."""
    if isinstance(form, OffloadedFormat):
        form = form.device_form if isinstance(form.device_form, StoredForm) else form.host_form
    dequantised = f"dequantised to {str(dtype).removeprefix('torch.')}"
    if not isinstance(form, StoredForm) or not form.kept_types:
        return dequantised
    changes = [f"{name} in {bits} bits" for name, bits in form.widened.items()]
    if form.without_kernel:
        some = [f"some {name}" if name in form.kept_types else name for name in form.without_kernel]
        changes.append(f"{' and '.join(some)} {dequantised}")
    return f"{', '.join(changes)}, others kept as they are" if changes else "kept as they are"


def stored_form(weights: Weights, config: ModelConfig) -> StoredForm:
    """Return the format for a CPU that keeps as many matrices quantised as possible.

    Fused matrices stay quantised if all their parts can.
    """
    matrices: dict[str, tuple[PartShape, ...]] = {}
    for matrix in config.own_matrices:
        parts = [weights.tensors[name] for name in matrix.weights]
        if any(part.is_quantised for part in parts):
            shapes = [
                PartShape(part.blocks.type_name if part.blocks else part.type_name, part.shape[0])
                for part in parts
            ]
            matrices[matrix.name] = tuple(merged(shapes) if matrix.experts else shapes)
    return StoredForm(stored=matrices)


def uniform_form(config: ModelConfig, type_name: str) -> StoredForm:
    """Return the format for a CPU with one type for all matrices.

    Matrices whose width is not a multiple of its block size use Q8_0, which has the shortest blocks.
    """
    elements = BY_NAME[type_name].elements
    return StoredForm(
        stored={
            matrix.name: (PartShape("Q8_0" if matrix.columns % elements else type_name, matrix.rows),)
            for matrix in config.own_matrices
        }
    )


def forms_of(form: WeightFormat, config: ModelConfig) -> set[str]:
    """Return the names (`Linear.form`) of the formats of a model's quantised linear layers."""
    if isinstance(form, OffloadedFormat):
        return forms_of(form.device_form, config) | forms_of(form.host_form, config)
    if not isinstance(form, StoredForm):
        return set()
    names = [name for name, _ in config.each_matrix()]
    names += ["embedding"] if config.tie_word_embeddings else []
    kept = [form.named(name).parts for name in names]
    return {"+".join(sorted({part.type_name for part in parts})) for parts in kept if parts}
