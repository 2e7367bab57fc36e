"""Weights of a CPU, multiplied by oneDNN.

torch hands float32 products to MKL, which on AMD's CPUs reads weights at a fraction of the memory's speed.
oneDNN comes closer, most of all with weights that it has packed beforehand; these help in bfloat16, too. It
is called by the operators that compiled models of torch use. They cannot write into given memory.
"""

import platform
from functools import cache
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

_X86_64 = ("x86_64", "amd64")
_DTYPES = (torch.float32, torch.bfloat16)


class OneDNN:
    """See `protocol.Linear`.

    Args:
        weight: [out, in], to be loaded, or loaded already if it is not to be packed.
        bias: [out]
        form: "packed": the weight is brought into an order of oneDNN's own once it is loaded. "shared": it
            stays as it is, since somebody else needs it, too. "small": likewise, and torch multiplies it with
            one token, oneDNN with several.
    """

    writes_in_place = False

    def __init__(
        self, weight: Tensor, bias: Tensor | None, form: Literal["packed", "shared", "small"]
    ) -> None:
        self.weight = weight  # packed, it has no elements that torch could read or write
        self.bias = bias
        self.form: str = form
        self._is_small = form == "small"
        self._rows_to_pack = len(weight) if form == "packed" else 0  # that have not come yet

    def memory(self) -> dict[torch.device, int]:
        """See `Linear`, likewise the others."""
        return {self.weight.device: self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)}

    def load(self, row: int, weight: Tensor) -> None:
        """Each row comes once."""
        self.weight[row : row + len(weight)].copy_(weight)
        if self._rows_to_pack:
            self._rows_to_pack -= len(weight)
            if self._rows_to_pack == 0:
                self.weight = _packed(self.weight)

    def dense(self) -> Tensor:  # noqa: D102
        return self.weight if self.weight.layout is torch.strided else self.weight.to_dense()

    def multiply(self, x: Tensor, out: Tensor) -> Tensor:  # noqa: D102
        count = len(x)
        if self._is_small and count == 1:
            return linear(x, self.weight, self.bias)
        missing = padded_rows(count) - count
        if missing == 0:
            return _onednn_linear(x, self.weight, self.bias)
        return _onednn_linear(pad(x, (0, 0, 0, missing)), self.weight, self.bias)[:count]


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
