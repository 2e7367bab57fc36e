"""Common arguments of the native functions: tensor views, and the instruction set."""

import os
from collections.abc import Callable

import torch

from neo_desktop.native._native import available_isas

DTYPE_CODES = {
    torch.float32: 0,
    torch.float16: 1,
    torch.bfloat16: 2,
    torch.int8: 3,
    torch.int32: 4,
    torch.int64: 5,
}
"""Dtypes that native functions read → C++ codes."""

View = tuple[str, int, int, tuple[int, ...], tuple[int, ...]]
"""A tensor's name for error messages, its address, code of its dtype, shape and strides."""


def view_of(name: str, tensor: torch.Tensor) -> View:
    """Return a CPU tensor in the form of the native functions.

    Raises:
        ValueError: it is not on the CPU, or has an unsupported layout or dtype.
    """
    if tensor.device.type != "cpu":
        raise ValueError(f"{name} is on {tensor.device}; expected a CPU tensor")
    if tensor.layout is not torch.strided:
        raise ValueError(f"{name} has layout {tensor.layout}; expected torch.strided")
    code = DTYPE_CODES.get(tensor.dtype)
    if code is None:
        raise ValueError(f"{name} has dtype {tensor.dtype}, which the native kernels do not read")
    return name, tensor.data_ptr(), code, tuple(tensor.shape), tensor.stride()


def check_contiguous(tensor: torch.Tensor) -> None:
    """Raise ValueError unless a tensor is contiguous and on the CPU."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError("tensor must be contiguous and on the CPU")


def _chosen_isa() -> str:
    return available_isas()[-1]


def default_isa() -> str:
    """Return NEO_DESKTOP_ISA of the environment, else the choice of `follow_isa`; initially the strongest."""
    return os.environ.get("NEO_DESKTOP_ISA") or _chosen_isa()


def follow_isa(choice: Callable[[], str]) -> None:
    """Set the default instruction set: `choice` returns one of `available_isas()`."""
    global _chosen_isa  # noqa: PLW0603
    _chosen_isa = choice
