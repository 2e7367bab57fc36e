"""Matmuls with weights that stay in 4 or 8 bits, and models with these weights."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from dense_model import logits_of_all
from gguf_files import HALVES, STORED, stored_rows, write_gguf
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from neo_desktop import Engine, native
from neo_desktop.engine.sampling_params import SamplingParams
from neo_desktop.models.checkpoint import open_checkpoint
from neo_desktop.models.decoder import Decoder
from neo_desktop.models.gguf.container import GGUFFile
from neo_desktop.models.json_file import ModelError
from neo_desktop.models.linear.quantised import KERNEL_TYPES, PartShape, Quantised
from neo_desktop.models.registry import check_model, load_model
from neo_desktop.models.stages import Stages
from neo_desktop.models.state import Scratch, State
from neo_desktop.models.stored_form import stored_form

CPU = torch.device("cpu")


def loaded(parts: list[tuple[PartShape, Tensor]], columns: int, bias: Tensor | None = None) -> Quantised:
    dtype = torch.float32 if bias is None else bias.dtype
    linear = Quantised([part for part, _ in parts], columns, bias, dtype)
    first = 0
    for part, raw in parts:
        for row in range(0, part.rows, 48):
            linear.load_stored(first + row, raw[row : row + 48])
        first += part.rows
    return linear


def check(x: Tensor, weight: Tensor, bias: Tensor | None, product: Tensor) -> None:
    """Allow an error of half of 1/127 of the block's largest number per input, and of float32 sums."""
    blocks = x.double().unflatten(1, (-1, 32))
    steps = (blocks.abs().amax(2, keepdim=True) / 127).expand_as(blocks).reshape(x.shape)
    magnitude = (x.double().abs() + steps) @ weight.double().abs().T
    added = 0.0 if bias is None else bias.double()
    exact = x.double() @ weight.double().T + added
    eps = torch.finfo(torch.float32).eps
    bound = steps / 2 @ weight.double().abs().T + (x.shape[1] + 8) * eps * magnitude
    if bias is not None:
        bound += eps * exact.abs()
    bound += torch.finfo(x.dtype).eps * (exact.abs() + bound)
    assert product.dtype is x.dtype
    assert ((product.double() - exact).abs() <= bound + 1e-30).all()


@given(
    st.lists(st.tuples(st.sampled_from(KERNEL_TYPES), st.integers(1, 70)), min_size=1, max_size=3),
    st.integers(1, 12),
    st.one_of(st.integers(1, 9), st.integers(1, 80)),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.booleans(),
    st.integers(0, 99),
)
def test_products_are_as_exact_as_inputs_of_8_bits(
    shapes: list[tuple[str, int]], blocks: int, count: int, dtype: torch.dtype, has_bias: bool, seed: int
) -> None:
    """Results are the same for all instruction sets and thread counts, and for a row alone."""
    columns = math.lcm(*(STORED[name].elements for name, _ in shapes)) * blocks
    parts = [
        (PartShape(name, rows), stored_rows(name, rows, columns, seed + i))
        for i, (name, rows) in enumerate(shapes)
    ]
    weight = torch.cat([STORED[part.type_name].dequantised(raw) for part, raw in parts])
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, columns, generator=generator).to(dtype) / 16
    x[:, :32] *= 10
    bias = torch.randn(len(weight), generator=generator).to(dtype) if has_bias else None
    linear = loaded(parts, columns, bias)
    assert torch.equal(linear.dense(), weight.to(linear.dense().dtype))
    assert linear.memory()[CPU] == sum(
        native.packed_bytes(part.type_name, part.rows, columns) for part, _ in parts
    ) + (0 if bias is None else bias.nbytes)
    products = []
    for isa in native.available_isas():
        for threads in (1, 3):
            product = x.new_full((count, len(weight)), torch.nan)
            native.packed_linear(x, linear._native, bias, product, threads, isa=isa)
            products.append(product)
    if dtype is not torch.float16 or weight.abs().max() < 500:
        check(x, weight, bias, products[0])
    assert all(torch.equal(each.nan_to_num(), products[0].nan_to_num()) for each in products)
    alone = linear.multiply(x[-1:], x.new_empty(1, len(weight)))
    assert torch.equal(alone.nan_to_num(), products[0][-1:].nan_to_num())


@pytest.mark.parametrize("isa", native.available_isas())
@pytest.mark.parametrize("name", KERNEL_TYPES)
def test_the_largest_numbers_do_not_overflow(name: str, isa: str) -> None:
    for byte in (0x00, 0x0F, 0x7F, 0x80, 0xF0, 0xFF):
        raw = stored_rows(name, 16, 256)
        blocks = raw.view(16, -1, STORED[name].nbytes)
        halves = {at + i for at in HALVES.get(name, (0,)) for i in (0, 1)} or {0}
        blocks[:, :, [i for i in range(STORED[name].nbytes) if i not in halves]] = byte
        linear = loaded([(PartShape(name, 16), raw)], 256)
        for x in (torch.ones(1, 256), -torch.ones(1, 256)):
            product = x.new_empty(1, 16)
            native.packed_linear(x, linear._native, None, product, isa=isa)
            check(x, linear.dense(), None, product)


@pytest.mark.parametrize("isa", native.available_isas())
def test_what_is_not_finite_stays_with_its_row_and_zeros_are_zeros(isa: str) -> None:
    linear = loaded([(PartShape("Q4_1", 20), stored_rows("Q4_1", 20, 96))], 96)
    x = torch.randn(5, 96, generator=torch.Generator().manual_seed(0))
    x[1, 40], x[2, 7], x[3] = torch.nan, torch.inf, 0.0
    product = x.new_empty(5, 20)
    native.packed_linear(x, linear._native, None, product, isa=isa)
    assert product[1:3].isnan().all()
    assert (product[3] == 0).all()
    rows = torch.tensor([0, 4])
    check(x[rows], linear.dense(), None, product[rows])


@pytest.mark.parametrize("name", KERNEL_TYPES)
def test_rows_are_those_of_the_file_and_can_be_looked_up(name: str) -> None:
    raw = stored_rows(name, 50, 512)
    linear = loaded([(PartShape(name, 50), raw)], 512)
    dense = STORED[name].dequantised(raw)
    assert torch.equal(linear.dense(), dense)
    rows, found = torch.tensor([49, 0, 17, 17]), torch.empty(4, 512)
    linear.look_up(rows, found)
    assert torch.equal(found, dense[rows])


def test_scales_of_mxfp4_are_any_power_of_two_and_what_is_none_is_refused() -> None:
    raw = stored_rows("MXFP4", 256, 32)
    raw[:, 0] = torch.arange(256)
    exponents = torch.arange(253) - 127.0  # beyond, floats are infinite
    numbers = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]).double()
    places = torch.cat((raw[:, 1:] & 15, raw[:, 1:] >> 4), 1).int()
    expected = numbers[places[:253]] * 2.0 ** exponents.double()[:, None]
    linear = loaded([(PartShape("MXFP4", 253), raw[:253])], 32)
    assert torch.equal(linear.dense().double(), expected)
    products = []
    for isa in native.available_isas():
        product = torch.empty(1, 253)
        native.packed_linear(torch.ones(1, 32), linear._native, None, product, isa=isa)
        products.append(product)
    for found, sums in zip(products[0][0, :240].double(), expected[:240].sum(1), strict=True):
        torch.testing.assert_close(found, sums, rtol=1e-5, atol=1e-38)
    assert all(torch.equal(product, products[0]) for product in products)
    with pytest.raises(ValueError, match="scales that are not finite"):
        loaded([(PartShape("MXFP4", 1), raw[255:])], 32)


SIZES = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
TOKENS = torch.randint(0, 320, (40,), generator=torch.Generator().manual_seed(1))


def kept_and_dequantised(path: Path, dtype: torch.dtype = torch.float32) -> tuple[Decoder, Decoder]:
    checkpoint = open_checkpoint(path)
    config = checkpoint.config()
    form = stored_form(check_model(checkpoint, config), config)
    kept = load_model(checkpoint, config, dtype=dtype, device=CPU, form=form)
    assert kept.nbytes == config.weight_bytes(dtype, form)
    assert config.loading_bytes(dtype, CPU, form) >= kept.nbytes
    return kept, load_model(checkpoint, config, dtype=dtype, device=CPU)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("type_name", KERNEL_TYPES)
def test_a_model_computes_with_the_weights_of_its_file(
    type_name: str, tied: bool, make_checkpoint: Any, tmp_path: Path
) -> None:
    sizes = SIZES | {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    _, model = make_checkpoint(**sizes, tie_word_embeddings=tied, attention_bias=True)
    for weight in model.parameters():  # large weights in wide layers would amplify errors
        weight.data *= 0.2 if weight.ndim == 2 else 1.0
    path = write_gguf(tmp_path / "model.gguf", model, type_name=type_name)
    kept, dequantised = kept_and_dequantised(path)
    assert {linear.form for linear in kept.linears()} == {type_name}
    for ours, theirs in zip(kept.linears(), dequantised.linears(), strict=True):
        assert torch.equal(ours.dense(), theirs.dense())
    matrices = sum(linear.dense().numel() for linear in dequantised.linears())
    assert kept.nbytes < dequantised.nbytes - 2.5 * matrices  # at most 1.5 of 4 bytes per weight are left
    found, expected = (logits_of_all(each, TOKENS) for each in (kept, dequantised))
    assert 0 < (found - expected).norm() < 0.03 * expected.norm()


@pytest.mark.parametrize("rows", [1, 5, 32, 33])
def test_layers_in_one_call_are_those_of_single_products(
    rows: int, make_checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, model = make_checkpoint(**SIZES, attention_bias=True)
    kept, _ = kept_and_dequantised(write_gguf(tmp_path / "model.gguf", model, type_name="Q4_1"))
    config = kept.config

    def hidden(max_rows: int) -> Tensor:
        monkeypatch.setattr("neo_desktop.models.stages.MAX_ROWS", max_rows)
        stages = Stages(kept)
        scratch = Scratch.empty(config, rows, torch.float32, CPU)
        state = State.empty(config, rows, torch.float32, CPU, scratch)
        stages.embed(TOKENS[:rows], torch.arange(rows), state)
        for layer in range(config.num_layers):
            stages.advance(layer, state)
            state.attention.copy_(stages.heads(state)[0])  # any function of the previous layer
        stages.advance(config.num_layers, state)
        return state.residual + state.x

    assert torch.equal(hidden(32), hidden(0))


def test_parts_of_one_matrix_may_be_stored_differently(make_checkpoint: Any, tmp_path: Path) -> None:
    _, model = make_checkpoint(**SIZES)
    path = write_gguf(
        tmp_path / "model.gguf",
        model,
        type_name="Q4_0",
        type_names={"attn_v": "Q8_0", "ffn_up": "BF16", "ffn_down": "F32"},
    )
    kept, dequantised = kept_and_dequantised(path)
    for layer in kept.layers:
        assert (layer.qkv.form, layer.output.form) == ("Q4_0+Q8_0", "Q4_0")
        assert layer.mlp.gate_up.form == dequantised.layers[0].mlp.gate_up.form
        assert layer.mlp.down.form == dequantised.layers[0].mlp.down.form
    found, expected = (logits_of_all(each, TOKENS) for each in (kept, dequantised))
    assert 0 < (found - expected).norm() < 0.03 * expected.norm()


def test_scales_that_are_not_finite_are_refused(make_checkpoint: Any, tmp_path: Path) -> None:
    _, model = make_checkpoint(**SIZES)
    path = write_gguf(tmp_path / "model.gguf", model, type_name="Q8_0")
    offset = GGUFFile(path).tensors["blk.1.ffn_up.weight"].offset
    content = bytearray(path.read_bytes())
    content[offset : offset + 2] = b"\xff\x7f"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.up_proj\.weight .* scales that are not finite"):
        kept_and_dequantised(path)


def test_a_request_alone_has_the_tokens_that_it_has_in_a_batch(make_checkpoint: Any, tmp_path: Path) -> None:
    _, model = make_checkpoint(**SIZES)
    path = write_gguf(tmp_path / "model.gguf", model, type_name="Q4_1")
    prompts = [TOKENS[first : first + length].tolist() for first, length in ((0, 3), (5, 30), (20, 11))]
    settings = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with Engine.from_pretrained(path, device="cpu", policy="gpu-only", gpu_cache_tokens=1024) as engine:
        assert {linear.form for linear in engine._decoder.linears()} == {"Q4_1"}
        together = [output.token_ids for output in engine.generate(prompts, settings)]
        alone = [engine.generate([prompt], settings)[0].token_ids for prompt in prompts]
    assert together == alone


def test_weights_and_everything_else_have_one_dtype() -> None:
    with pytest.raises(ValueError, match="weights_dtype 'float32' does not go with dtype 'bfloat16'"):
        Engine.from_pretrained("nowhere", dtype="bfloat16", weights_dtype="float32")
    with pytest.raises(ValueError, match="needs a GPU"):
        Engine.from_pretrained(device="cpu", weights_dtype="exact")
