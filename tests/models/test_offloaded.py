"""Matrices split between a device and host memory: matmuls, models, and matrices that cannot be split."""

from dataclasses import replace

import pytest
import torch
from dense_model import logits_of_all
from hypothesis import given
from hypothesis import strategies as st
from offloaded_case import multiply_in_parts, random_split
from seeds import seeds
from torch import Tensor

from neo_desktop.models.checkpoint import open_checkpoint
from neo_desktop.models.config import ModelConfig
from neo_desktop.models.decoder import Decoder
from neo_desktop.models.linear.dense import DENSE, Dense
from neo_desktop.models.linear.offloaded import OffloadedFormat, OffloadedLinear
from neo_desktop.models.ops import Product
from neo_desktop.models.registry import load_model, random_model
from neo_desktop.models.shapes import shape
from neo_desktop.models.stages import Stages
from neo_desktop.models.state import Scratch, State

CPU = torch.device("cpu")
PLAIN = Dense(uses_tiles=False)  # the weight layout of a GPU
SHARES = (0.0, 0.3, 0.7, 1.0)


def split_of(weight: Tensor, bias: Tensor | None, resident: int) -> OffloadedLinear:
    """Return a split matrix, loaded in pieces, one of which spans device and host."""
    rows, columns = weight.shape
    form = OffloadedFormat(PLAIN, DENSE, {"0.qkv": resident}).named("0.qkv")
    made = form.empty(rows, columns, has_bias=bias is not None, dtype=weight.dtype, device=CPU)
    assert isinstance(made, OffloadedLinear)
    for row in range(0, rows, 100):
        made.load(row, weight[row : row + 100])
    if bias is not None:
        for row in range(0, rows, 70):
            made.load_bias(row, bias[row : row + 70])
    assert made.memory() == {
        CPU: form.nbytes(rows, columns, weight.dtype)
        + DENSE.nbytes(rows - resident, columns, weight.dtype)
        + (0 if bias is None else bias.nbytes)
    }
    return made


@given(
    st.integers(1, 40),
    st.integers(1, 400),
    st.integers(1, 60),
    st.floats(0, 0.999),
    st.floats(0, 1),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.booleans(),
    st.integers(0, 99),
)
def test_products_do_not_depend_on_where_a_row_is_computed(
    count: int,
    rows: int,
    pairs: int,
    resident_share: float,
    share: float,
    dtype: torch.dtype,
    has_bias: bool,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, 2 * pairs, generator=generator).to(dtype)
    bias = torch.randn(rows, generator=generator).to(dtype) if has_bias else None
    x = torch.randn(count, 2 * pairs, generator=generator).to(dtype)
    linear = split_of(weight, bias, int(rows * resident_share) // 64 * 64)
    assert torch.equal(linear.dense(), weight)
    exact = x.double() @ weight.double().T + (0.0 if bias is None else bias.double())
    bound = torch.finfo(dtype).eps * exact.abs() + 1e-5 * (x.double().abs() @ weight.double().abs().T + 4)
    for each in (share, 0.0, 1.0):
        out = x.new_full((count, rows), torch.nan)
        multiply_in_parts(linear, x, out, each)
        assert ((out.double() - exact).abs() <= bound).all()
    out = linear.multiply(x, x.new_full((count, rows), torch.nan))
    assert ((out.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize(
    ("architecture", "settings_of_it"),
    [
        ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True, "intermediate_size": 200}),
        ("LlamaForCausalLM", {"tie_word_embeddings": True, "hidden_size": 64}),
        ("Qwen3ForCausalLM", {"head_dim": 32, "attention_bias": True}),
    ],
)
@pytest.mark.parametrize("seed", seeds(2, 3))
def test_a_split_model_says_what_transformers_says(architecture, settings_of_it, seed, make_checkpoint):
    """Logits agree through `advance`, one matrix after the other, and through steps, at any share."""
    path, reference = make_checkpoint(architecture, **settings_of_it)
    config = ModelConfig.from_pretrained(path)
    form = random_split(config, seed, device_form=PLAIN, host_form=DENSE)
    model = load_model(open_checkpoint(path), config, dtype=torch.float32, device=CPU, form=form)
    assert model.has_splits
    with pytest.raises(ValueError, match="not supported with tensor parallelism"):
        Stages(model, reduce=lambda part: None)
    token_ids = torch.randint(0, config.vocab_size, (40,), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        expected = reference(token_ids[None]).logits[0]
    for logits in (logits_of_all(model, token_ids), *(logits_in_steps(model, token_ids, s) for s in SHARES)):
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)
        assert torch.equal(logits.argmax(1), expected.argmax(1))


def test_memory_is_told_before_it_is_taken() -> None:
    config = shape("tiny")
    form = random_split(config, 1, device_form=PLAIN, host_form=DENSE)
    of_host = sum(
        DENSE.nbytes(matrix.rows - resident, matrix.columns, torch.float32)
        for name, matrix in config.each_matrix()
        if (resident := form.resident_rows.get(name, matrix.rows)) < matrix.rows
    )
    model = Decoder(config, dtype=torch.float32, device=CPU, form=form)
    assert of_host > 0
    assert model.memory() == {CPU: config.weight_bytes(torch.float32, form) + of_host}


def logits_in_steps(model: Decoder, token_ids: Tensor, share: float) -> Tensor:
    """Return the logits of `logits_of_all`, but compute offloaded matmuls outside the stages."""

    def advance(stages: Stages, index: int, state: State, store: object = None) -> None:
        assert store is None
        for step in stages.steps(index, state):
            if step.work is not None:
                step.work()
            if step.cut is not None:
                product = step.cut
                assert isinstance(product, Product)
                assert product.x.is_contiguous()
                product.out.fill_(torch.nan)
                multiply_in_parts(product.linear, product.x, product.out, share)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stages, "advance", advance)
        return logits_of_all(model, token_ids)


def test_steps_are_cut_at_what_is_split_and_nowhere_else() -> None:
    config = shape("tiny")
    names = {"0.down": 0, "1.qkv": 64, "1.output": 0}
    model = Decoder(config, dtype=torch.float32, device=CPU, form=OffloadedFormat(PLAIN, DENSE, names))
    stages = Stages(model)
    assert {name for _, name in stages.offloaded_matrices} == {"output", "down", "qkv"}
    of = config, 2, torch.float32, CPU
    state = State.empty(*of, Scratch.empty(*of))

    def cuts(index: int) -> list[tuple[bool, str | None]]:
        return [
            (step.work is not None, step.cut.name if isinstance(step.cut, Product) else None)
            for step in stages.steps(index, state)
        ]

    assert cuts(0) == [(True, None)]
    assert cuts(1) == [(True, "down"), (True, "qkv"), (True, None)]
    assert cuts(2) == [(False, "output"), (True, None)]
    assert not random_model(config, dtype=torch.float32, device=CPU).has_splits


def test_what_cannot_be_split_is_told() -> None:
    form = OffloadedFormat(PLAIN, DENSE, {"0.qkv": 48, "0.down": 128, "0.output": 0})
    options = {"has_bias": False, "dtype": torch.float32, "device": CPU}
    with pytest.raises(ValueError, match=r"48 of the 96 rows of 0.qkv cannot stay on the device"):
        form.named("0.qkv").empty(96, 8, **options)
    with pytest.raises(ValueError, match=r"128 of the 96 rows of 0.down cannot stay"):
        form.named("0.down").nbytes(96, 8, torch.float32)
    with pytest.raises(ValueError, match=r"0.output cannot be offloaded: its 7 columns"):
        form.named("0.output").empty(96, 7, **options)
    with pytest.raises(ValueError, match=r"a share of 1\.5 cannot be streamed"):
        split_of(torch.randn(96, 8), None, 64).streamed(1.5)
    assert not isinstance(replace(form, name="head").empty(96, 8, **options), OffloadedLinear)
