"""GGUF files with a mixture of experts: transformers' results, and weights kept in their stored format."""

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from dense_model import logits_of_all
from gguf_files import dequantised, joined, write_gguf
from torch import Tensor

from neo_desktop import Engine, SamplingParams
from neo_desktop.engine.profiling.iteration_timer import IterationTimer
from neo_desktop.models.checkpoint import open_checkpoint
from neo_desktop.models.decoder import Decoder, Experts
from neo_desktop.models.json_file import ModelError, UnsupportedModelError
from neo_desktop.models.linear.offloaded import OffloadedLinear
from neo_desktop.models.linear.quantised import KERNEL_TYPES
from neo_desktop.models.linear.shares import StreamedShares
from neo_desktop.models.registry import check_model, load_model
from neo_desktop.models.stored_form import stored_form

CPU = torch.device("cpu")
SIZES = {"vocab_size": 320, "hidden_size": 64, "head_dim": 16, "num_hidden_layers": 2}
WIDE = SIZES | {"hidden_size": 256, "head_dim": 64}
VARIANTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mixtral": ("llama", "MixtralForCausalLM", {"intermediate_size": 128, "num_local_experts": 4}),
    "qwen3moe": (
        "qwen3moe",
        "Qwen3MoeForCausalLM",
        {
            "intermediate_size": 96,
            "moe_intermediate_size": 64,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
        },
    ),
}
TOKENS = torch.randint(0, 320, (40,), generator=torch.Generator().manual_seed(1))


def model_of(variant: str, make_checkpoint: Any, **settings: Any) -> tuple[Any, str]:
    architecture, model_class, sizes = VARIANTS[variant]
    _, model = make_checkpoint(model_class, **SIZES | sizes | settings)
    return model, architecture


def load(path: Path, *, keep: bool = False) -> Decoder:
    checkpoint = open_checkpoint(path)
    config = checkpoint.config()
    if not keep:
        return load_model(checkpoint, config, dtype=torch.float32, device=CPU)
    form = stored_form(check_model(checkpoint, config), config)
    kept = load_model(checkpoint, config, dtype=torch.float32, device=CPU, form=form)
    assert kept.nbytes == config.weight_bytes(torch.float32, form)
    return kept


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_agree_with_transformers(variant: str, make_checkpoint: Any, tmp_path: Path) -> None:
    model, architecture = model_of(variant, make_checkpoint)
    path = write_gguf(tmp_path / "model.gguf", model, architecture=architecture)
    with torch.no_grad():
        expected = model(TOKENS[None]).logits[0]
    assert expected.std() > 0.3
    torch.testing.assert_close(logits_of_all(load(path), TOKENS), expected, rtol=0, atol=1e-4)
    config = open_checkpoint(path).config()
    assert config.num_parameters == sum(weight.numel() for weight in model.parameters())


@pytest.mark.parametrize("type_name", ["F16", "Q8_0", "Q4_1"])
def test_weights_are_those_of_the_reference(type_name: str, make_checkpoint: Any, tmp_path: Path) -> None:
    model, architecture = model_of("mixtral", make_checkpoint)
    path = write_gguf(tmp_path / "model.gguf", model, architecture=architecture, type_name=type_name)
    tensors, state = open_checkpoint(path).weights().tensors, dict(model.named_parameters())
    for layer in range(2):
        prefix = f"model.layers.{layer}.block_sparse_moe."
        gate_up = state[f"model.layers.{layer}.mlp.experts.gate_up_proj"].detach()
        down = state[f"model.layers.{layer}.mlp.experts.down_proj"].detach()
        router = joined(tensors[f"{prefix}gate.weight"].pieces())
        assert torch.equal(router, state[f"model.layers.{layer}.mlp.gate.weight"])
        for expert in range(4):
            gate, up = gate_up[expert].chunk(2)
            for name, weight in (("w1", gate), ("w3", up), ("w2", down[expert])):
                found = joined(tensors[f"{prefix}experts.{expert}.{name}.weight"].pieces())
                assert torch.equal(found, dequantised(weight, type_name))


def off(found: Tensor, expected: Tensor) -> Tensor:
    """Return the median token's relative error: near a tie, a token may choose other experts."""
    return ((found - expected).norm(dim=1) / expected.norm(dim=1)).median()


@pytest.mark.parametrize("type_name", KERNEL_TYPES)
def test_experts_stay_as_they_are_stored(type_name: str, make_checkpoint: Any, tmp_path: Path) -> None:
    settings = WIDE | {"intermediate_size": 256, "num_hidden_layers": 1}
    model, architecture = model_of("mixtral", make_checkpoint, **settings)
    for weight in model.parameters():
        weight.data *= 0.3 if weight.ndim > 1 else 1.0
    path = write_gguf(tmp_path / "model.gguf", model, architecture=architecture, type_name=type_name)
    kept, expected = load(path, keep=True), load(path)
    for ours, theirs in zip(kept.layers, expected.layers, strict=True):
        assert isinstance(ours.mlp, Experts)
        assert isinstance(theirs.mlp, Experts)
        for kind in ("gate", "up", "down"):
            matrix = getattr(ours.mlp, kind)
            assert matrix.form == type_name
            assert torch.equal(matrix.dense(), getattr(theirs.mlp, kind).dense())
        assert ours.mlp.router.form == "tiles"
    found = logits_of_all(kept, TOKENS)
    assert 0 < off(found, logits_of_all(expected, TOKENS)) < 0.03


def test_matrices_of_experts_may_be_stored_differently(make_checkpoint: Any, tmp_path: Path) -> None:
    model, architecture = model_of("mixtral", make_checkpoint)
    names = {"ffn_up": "Q8_0", "0.ffn_down": "Q5_0", "1.ffn_down": "F16"}
    path = write_gguf(
        tmp_path / "model.gguf", model, architecture=architecture, type_name="Q4_0", type_names=names
    )
    kept, expected = load(path, keep=True), load(path)
    forms = [
        [getattr(layer.mlp, kind).form for kind in ("gate", "up", "down")]
        for layer in kept.layers
        if isinstance(layer.mlp, Experts)
    ]
    assert forms == [["Q4_0", "Q8_0", "Q5_0"], ["Q4_0", "Q8_0", "tiles"]]
    assert 0 < off(logits_of_all(kept, TOKENS), logits_of_all(expected, TOKENS)) < 0.03


def test_floats_beside_quantised_ones_are_computed_too(make_checkpoint: Any, tmp_path: Path) -> None:
    model, architecture = model_of("mixtral", make_checkpoint)
    path = write_gguf(
        tmp_path / "a.gguf", model, architecture=architecture, type_name="Q4_0", type_names={"ffn_up": "F32"}
    )
    assert 0 < off(logits_of_all(load(path, keep=True), TOKENS), logits_of_all(load(path), TOKENS)) < 0.03


def test_a_request_alone_has_the_tokens_that_it_has_in_a_batch(make_checkpoint: Any, tmp_path: Path) -> None:
    model, architecture = model_of("qwen3moe", make_checkpoint)
    path = write_gguf(tmp_path / "model.gguf", model, architecture=architecture, type_name="Q4_1")
    prompts = [TOKENS[first : first + length].tolist() for first, length in ((0, 3), (5, 30), (20, 11))]
    settings = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with Engine.from_pretrained(path, device="cpu", policy="neo", gpu_cache_tokens=512) as engine:
        assert "Q4_1" in {linear.form for linear in engine._decoder.linears()}
        together = [output.token_ids for output in engine.generate(prompts, settings)]
        alone = [engine.generate([prompt], settings)[0].token_ids for prompt in prompts]
    assert together == alone


@pytest.mark.sample(1)
@pytest.mark.parametrize("type_name", ["F32", "Q4_1"])
def test_a_model_that_is_split_has_the_tokens_of_the_whole_one(
    type_name: str, make_checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Quantised rows are split, and the CPU computes its part; of float models, some experts are streamed."""
    share = StreamedShares((4, 5), (0.0, 0.5 if type_name == "F32" else 0.0))

    def fixed(timer: IterationTimer, max_rows: int, seconds: float) -> None:
        decoder = timer._decoder
        decoder.streamed_shares = decoder.streamed_experts = share

    monkeypatch.setattr(IterationTimer, "measure_shares", fixed)
    model, architecture = model_of("qwen3moe", make_checkpoint)
    path = write_gguf(tmp_path / "model.gguf", model, architecture=architecture, type_name=type_name)
    prompts = [TOKENS[first : first + length].tolist() for first, length in ((0, 3), (5, 30), (20, 11))]
    settings = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with Engine.from_pretrained(path, device="cpu") as engine:
        expected = [output.token_ids for output in engine.generate(prompts, settings)]
        num_bytes = engine._decoder.nbytes
    for part in (0.8, 0.9):
        with Engine.from_pretrained(path, device="cpu", gpu_weights_gib=part * num_bytes / 2**30) as engine:
            moe_layers = [each.mlp for each in engine._decoder.layers if isinstance(each.mlp, Experts)]
            assert any(isinstance(moe.gate, OffloadedLinear) for moe in moe_layers)
            assert [output.token_ids for output in engine.generate(prompts, settings)] == expected


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"expert_count": 5}, ModelError, r"has the shape \[4, 128, 64\]"),
        ({"expert_count": 2}, ModelError, r"has the shape \[4, 128, 64\]"),
        ({"expert_count": 2000}, ModelError, "expert_count"),
        ({"expert_used_count": 7}, ModelError, "of which no token can take 7"),
        ({"expert_used_count": None}, ModelError, "expert_used_count"),
        ({"expert_feed_forward_length": 64}, ModelError, "has the shape"),
        ({"expert_feed_forward_length": 100}, UnsupportedModelError, "multiples of 64"),
        ({"expert_shared_count": 1}, UnsupportedModelError, "expert_shared_count"),
        ({"expert_gating_func": 2}, UnsupportedModelError, "expert_gating_func"),
        ({"expert_weights_scale": 2.5}, UnsupportedModelError, "expert_weights_scale"),
        ({"expert_count": 0}, UnsupportedModelError, "sets expert_"),
    ],
)
def test_experts_that_are_not_there_are_refused(
    changes: dict[str, Any], error: type[ModelError], message: str, make_checkpoint: Any, tmp_path: Path
) -> None:
    model, architecture = model_of("mixtral", make_checkpoint)
    metadata = {f"llama.{key}": value for key, value in changes.items()}
    path = write_gguf(tmp_path / "model.gguf", model, architecture=architecture, metadata=metadata)
    with pytest.raises(error, match=message):
        load(path)


def test_experts_of_a_damaged_file_are_refused(make_checkpoint: Any, tmp_path: Path) -> None:
    model, architecture = model_of("mixtral", make_checkpoint)
    path = write_gguf(tmp_path / "model.gguf", model, architecture=architecture, type_name="Q8_0")
    reader = gguf.GGUFReader(path)
    (tensor,) = (each for each in reader.tensors if each.name == "blk.1.ffn_up_exps.weight")
    content = bytearray(path.read_bytes())
    at = tensor.data_offset + tensor.n_bytes // 2  # the third of four experts
    content[at : at + 2] = b"\xff\x7f"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=r"experts\.2\.w3\.weight .* scales that are not finite"):
        load(path, keep=True)
