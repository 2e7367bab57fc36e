"""A linear layer's product, with the weight in the form that its device multiplies fastest.

On a CPU, torch hands float32 products to MKL, which on AMD's reads weights at a fraction of the memory's
speed. oneDNN comes closer, most of all with weights that it has packed beforehand; these help in bfloat16,
too. It is called by the operators that compiled models of torch use.
"""

import platform
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

_X86_64 = ("x86_64", "amd64")
_DTYPES = (torch.float32, torch.bfloat16)
# MKL has multiplied one row with so small a matrix before oneDNN has woken its threads (measured).
SMALL_BYTES = 1024**2


class Form(StrEnum):
    """What lies in memory, and what multiplies with it."""

    PLAIN = "plain"  # rows; torch's own choice
    SMALL = "small"  # rows; torch for one token, oneDNN for several
    SHARED = "shared"  # rows; oneDNN
    PACKED = "packed"  # an order of oneDNN's own, which it can change back into rows; oneDNN


@dataclass(frozen=True, slots=True)
class Linear:
    """`x @ weight.T + bias`; starts plain, so that it can be filled."""

    weight: Tensor  # [out, in]; packed, it has no elements that torch could read or write
    bias: Tensor | None = None  # [out]
    form: Form = Form.PLAIN

    @property
    def writes_in_place(self) -> bool:
        """Whether products lie in the memory that was given for them."""
        return self.form is Form.PLAIN

    def multiply(self, x: Tensor, out: Tensor) -> Tensor:
        """Return the product `[n, out]` with `x` `[n, in]`, of the weight's dtype.

        Args:
            out: room for it, not of x. It is used where `writes_in_place`.
        """
        count = len(x)
        if self.form is Form.PLAIN or (self.form is Form.SMALL and count == 1):
            if self.bias is None:
                return torch.mm(x, self.weight.t(), out=out)
            return torch.addmm(self.bias, x, self.weight.t(), out=out)
        missing = padded_rows(count) - count
        if missing == 0:
            return _onednn_linear(x, self.weight, self.bias)
        return _onednn_linear(pad(x, (0, 0, 0, missing)), self.weight, self.bias)[:count]

    def prepared(self, *, is_shared: bool = False) -> "Linear":
        """The same layer in the fastest form; plain where oneDNN is not used (`why_plain`).

        Args:
            is_shared: the weight is also needed as it is (tied embeddings). It is not packed then, because a
                second copy would take more memory than it is worth.
        """
        if why_plain(self.weight.device, self.weight.dtype) is not None:
            return self
        if self.weight.dtype is torch.float32 and self.weight.nbytes <= SMALL_BYTES:
            return replace(self, form=Form.SMALL)
        if is_shared:
            return replace(self, form=Form.SHARED)
        return replace(self, weight=_packed(self.weight), form=Form.PACKED)

    def dense(self) -> Tensor:
        """The weight `[out, in]`, row by row: a copy if it is packed, else the weight itself."""
        return self.weight.to_dense() if self.form is Form.PACKED else self.weight


def padded_rows(count: int) -> int:
    """With how many rows oneDNN multiplies instead of `count`: at most an eighth more.

    For each number of rows and each shape, oneDNN compiles a kernel in about 2 ms and keeps 0.5 MB. So there
    are eight numbers only from a power of two to the next.
    """
    step = 1 << max((count - 1).bit_length() - 4, 0)
    return -(-count // step) * step


def why_plain(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why weights stay plain on a device and in a dtype; None: oneDNN multiplies."""
    return _why_plain(device.type, dtype)


@cache
def _why_plain(device_type: str, dtype: torch.dtype) -> str | None:
    if device_type != "cpu":
        return f"oneDNN is for CPUs, not for {device_type}"
    if dtype not in _DTYPES:
        return f"oneDNN is not used in {dtype}"
    if platform.machine().lower() not in _X86_64:
        return f"oneDNN was not tried on {platform.machine()}"
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return "this torch was built without oneDNN"
    # The operators are not public ones: a torch in which they are gone or behave otherwise shows here.
    weight = (torch.arange(33 * 17) % 7 - 3).view(33, 17).to(dtype)
    x, bias = weight[:5].flip(0), weight[:, 0].contiguous()
    expected = linear(x.double(), weight.double(), bias.double()).to(dtype)  # whole numbers: exact
    try:
        packed = _packed(weight)
        products = [_onednn_linear(x, form, bias) for form in (packed, weight)]
        is_right = all(torch.equal(product, expected) for product in products)
        is_right = is_right and torch.equal(packed.to_dense(), weight)
    except (RuntimeError, AttributeError, NotImplementedError) as error:
        return f"oneDNN refuses {dtype}: {error}"
    return None if is_right else f"oneDNN's products in {dtype} are wrong"


def _packed(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight.default(weight)
    return packed


def _onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")
    return product
