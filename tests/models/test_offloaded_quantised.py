"""Quantised split matrices: matmuls, models of GGUF files, and kernels launched in advance."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from dense_model import logits_of_all
from fallback_levels import kernels_on
from gguf_files import STORED, stored_rows, write_gguf
from hypothesis import given
from hypothesis import strategies as st
from offloaded_case import multiply_in_parts, random_split
from torch import Tensor

from neo_desktop.engine.kernels import dispatch
from neo_desktop.models.checkpoint import open_checkpoint
from neo_desktop.models.linear import grouped
from neo_desktop.models.linear.dense import Dense
from neo_desktop.models.linear.grouped import CODINGS
from neo_desktop.models.linear.offloaded import OffloadedFormat, OffloadedLinear
from neo_desktop.models.linear.protocol import WeightFormat
from neo_desktop.models.linear.quantised import KERNEL_TYPES, PartShape, Quantised
from neo_desktop.models.registry import check_model, load_model
from neo_desktop.models.stored_form import StoredForm, stored_form

CPU = torch.device("cpu")
PLAIN = Dense(uses_tiles=False)
NAME = "0.qkv"


def load(linear: OffloadedLinear | Quantised, parts: list[Tensor]) -> None:
    """Load in pieces that start at tiles of a part, as from a file."""
    first = 0
    for raw in parts:
        for row in range(0, len(raw), 48):
            linear.load_stored(first + row, raw[row : row + 48])
        first += len(raw)


@given(
    st.lists(st.tuples(st.sampled_from(KERNEL_TYPES), st.integers(1, 150)), min_size=1, max_size=3),
    st.booleans(),
    st.integers(1, 20),
    st.floats(0, 0.999),
    st.floats(0, 1),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.booleans(),
    st.integers(0, 99),
)
def test_each_row_is_computed_as_where_it_lies(
    shapes: list[tuple[str, int]],
    is_kept: bool,
    count: int,
    resident_share: float,
    share: float,
    dtype: torch.dtype,
    has_bias: bool,
    seed: int,
) -> None:
    """The CPU's rows equal an unsplit CPU matrix; the device's rows use exact weights."""
    columns = math.lcm(*(STORED[name].elements for name, _ in shapes))
    parts = [stored_rows(name, rows, columns, seed + i) for i, (name, rows) in enumerate(shapes)]
    of_parts = tuple(PartShape(name, rows) for name, rows in shapes)
    exact = torch.cat([STORED[name].dequantised(raw) for (name, _), raw in zip(shapes, parts, strict=True)])
    rows = len(exact)
    generator = torch.Generator().manual_seed(seed)
    bias = torch.randn(rows, generator=generator).to(dtype) if has_bias else None
    x = torch.randn(count, columns, generator=generator).to(dtype) / 64

    host_form = StoredForm(stored={NAME: of_parts})
    resident = int(rows * resident_share) // 64 * 64
    form = OffloadedFormat(
        host_form.on_gpu(grouped) if is_kept else PLAIN, host_form, {NAME: resident}
    ).named(NAME)
    linear = form.empty(rows, columns, has_bias=has_bias, dtype=dtype, device=CPU)
    assert isinstance(linear, OffloadedLinear)
    assert linear.takes_stored
    load(linear, parts)
    whole = Quantised(of_parts, columns, bias, dtype)
    load(whole, parts)
    if bias is not None:
        linear.load_bias(0, bias)
    assert linear.memory()[CPU] == (0 if bias is None else bias.nbytes) + form.nbytes(
        rows, columns, dtype
    ) + host_form.named(NAME).of_rows(slice(resident, rows)).nbytes(rows - resident, columns, dtype)
    assert torch.equal(linear.dense().nan_to_num(), exact.to(dtype).nan_to_num())

    of_cpu = whole.multiply(x, x.new_empty(count, rows))
    weight = exact.to(dtype).double()
    of_device = x.double() @ weight.T + (0.0 if bias is None else bias.double())
    bound = 1e-5 * (x.double().abs() @ weight.abs().T) + torch.finfo(dtype).eps * of_device.abs() + 1e-5
    if is_kept:  # the weights are not rounded
        bound += torch.finfo(dtype).eps * (x.double().abs() @ weight.abs().T)
    for each in (share, 0.0, 1.0):
        out = x.new_full((count, rows), torch.nan)
        multiply_in_parts(linear, x, out, each)
        first = resident + linear.streamed(each)
        assert torch.equal(out[:, first:].nan_to_num(), of_cpu[:, first:].nan_to_num())
        if dtype is not torch.float16 or exact.abs().max() < 500:
            assert ((out[:, :first].double() - of_device[:, :first]).abs() <= bound[:, :first]).all()


SMALL = {
    "vocab_size": 272,
    "hidden_size": 64,
    "intermediate_size": 96,
    "head_dim": 16,
}  # in Triton's interpreter
LARGE = {"vocab_size": 272, "hidden_size": 256, "intermediate_size": 256, "head_dim": 64}


@pytest.mark.parametrize(
    ("level", "seed", "sizes", "types"),
    [
        pytest.param("triton", 3, SMALL, ("Q4_1", "Q8_0", "Q5_0", "MXFP4"), marks=pytest.mark.sample(0)),
        ("torch", 1, LARGE, ("Q4_K", "Q6_K", "Q2_K", "MXFP4")),
        ("torch", 2, LARGE, ("Q5_K", "Q5_K", "IQ4_XS", "Q3_K")),
    ],
)
def test_a_split_model_computes_with_the_weights_of_its_file(
    level: str, seed: int, sizes: Any, types: tuple[str, ...], make_checkpoint: Any, tmp_path: Path
) -> None:
    _, model = make_checkpoint(**sizes, num_hidden_layers=2, attention_bias=True)
    for weight in model.parameters():  # large weights in wide layers would amplify errors
        weight.data *= 0.2 if weight.ndim == 2 else 1.0
    others = dict(zip(("attn_v", "ffn_up", "ffn_down"), types[1:], strict=True))
    path = write_gguf(tmp_path / "model.gguf", model, type_name=types[0], type_names=others)
    checkpoint = open_checkpoint(path)
    config = checkpoint.config()
    stored = stored_form(check_model(checkpoint, config), config)
    device_form: WeightFormat = stored.on_gpu(dispatch) if level == "triton" else PLAIN
    form = random_split(config, seed, device_form=device_form, host_form=stored, kernels=dispatch)
    exact = load_model(checkpoint, config, dtype=torch.float32, device=CPU)
    with kernels_on(level):
        split = load_model(checkpoint, config, dtype=torch.float32, device=CPU, form=form)
        assert sum(isinstance(linear, OffloadedLinear) for linear in split.linears()) > 2
        for tokens, most in ((torch.arange(18), 1e-4), (torch.arange(5), 0.03)):
            found, expected = (logits_of_all(each, tokens) for each in (split, exact))
            assert (found - expected).norm() < most * expected.norm()


def test_a_cpu_keeps_what_a_gpu_keeps() -> None:
    """Otherwise a matrix could be quantised on one side, and dequantised on the other."""
    assert CODINGS.keys() == set(KERNEL_TYPES)
