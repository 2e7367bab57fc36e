"""Traced models, whose stages are cut from the code of `transformers`, against `transformers`."""

import logging
import shutil
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints import transformers_greedy
from cost_models import machine
from dense_model import logits_of_all
from quantised_folders import Tensors, awq, fp8, gptq, grid, quantise
from safetensors.torch import save_file
from seeds import first
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode
from traced_models import FAMILIES, SIZES, save
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from neo_desktop.app.shelf.checkpoint_summary import summarize
from neo_desktop.engine.engine import Engine
from neo_desktop.engine.loading import load
from neo_desktop.engine.options import EngineOptions
from neo_desktop.engine.sampling_params import SamplingParams
from neo_desktop.engine.schedule.policies import POLICIES
from neo_desktop.engine.setup import take_memory
from neo_desktop.models import native_operators
from neo_desktop.models.checkpoint import open_checkpoint
from neo_desktop.models.config import ModelConfig
from neo_desktop.models.json_file import ModelError
from neo_desktop.models.linear.dense import DENSE
from neo_desktop.models.operators import Store
from neo_desktop.models.registry import check_model, load_model, stages_of
from neo_desktop.models.state import Scratch, State
from neo_desktop.models.stored_form import stored_form
from neo_desktop.models.traced import fused
from neo_desktop.models.traced import stages as traced_stages
from neo_desktop.models.traced.builder import Builder
from neo_desktop.models.traced.config import read_traced
from neo_desktop.models.traced.graph import exported
from neo_desktop.models.traced.sizes import Source
from neo_desktop.models.traced.stages import TracedStages

CPU = torch.device("cpu")
WRITTEN = ("llama", "qwen3", "mistral")


class Folders(dict[str, Path]):
    """A folder per family, saved at its first use."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self._root = root

    def __missing__(self, name: str) -> Path:
        self[name] = save(self._root / name, *FAMILIES.get(name, (name, {})))
        return self[name]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return Folders(tmp_path_factory.mktemp("traced"))


@pytest.mark.parametrize("family", first(WRITTEN))
def test_cut_stages_compute_what_the_written_ones_do(folders: dict[str, Path], family: str) -> None:
    checkpoint = open_checkpoint(folders[family])
    token_ids = torch.randint(0, 300, (40,), generator=torch.Generator().manual_seed(0))
    config = ModelConfig.from_pretrained(checkpoint.path)
    written = load_model(checkpoint, config, dtype=torch.float32, device=CPU)
    traced = load_model(checkpoint, read_traced(checkpoint.path), dtype=torch.float32, device=CPU)
    expected = logits_of_all(written, token_ids)
    torch.testing.assert_close(
        logits_of_all(traced, token_ids, stages=stages_of(traced, None)), expected, rtol=1e-4, atol=1e-4
    )


PATTERNS = {
    "llama": {"AddRMSNorm": 2, "Gate": 1, "Rope": 2},
    "qwen3": {"AddRMSNorm": 2, "Gate": 1, "Rope": 2},
    "phi3": {"AddRMSNorm": 2, "Gate": 1, "Rope": 2},
    "olmo2": {"RMSNorm": 4, "Gate": 1, "Rope": 2},
    "gemma3": {"RMSNorm": 6, "Rope": 2},
    "gemma4": {"RMSNorm": 7, "Rope": 2},
}


@pytest.mark.parametrize("family", first(PATTERNS))
def test_operators_compute_what_they_take_the_place_of(
    folders: dict[str, Path], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores agree with the original code's; patterns are counted in the second layer."""
    path = folders[family]
    token_ids = torch.randint(0, 300, (9,), generator=torch.Generator().manual_seed(0))
    found = Counter[str]()
    fuse = traced_stages.fused_pieces

    def recorded(*given: Any) -> tuple[list[fx.GraphModule], set[fx.Node]]:
        pieces, sines = fuse(*given)
        found.update(type(each).__name__ for each in pieces[2].children())
        return pieces, sines

    def plain(builder: Builder, count: int, *_: Any) -> tuple[list[fx.GraphModule], set[fx.Node]]:
        return [builder.piece(index) for index in range(count)], set()

    for dtype, bound in ((torch.float32, 1e-4), (torch.bfloat16, 0.03)):
        scores = []
        for pieces_of in (recorded, plain):
            found.clear()
            monkeypatch.setattr(traced_stages, "fused_pieces", pieces_of)
            decoder = load_model(open_checkpoint(path), read_traced(path), dtype=dtype, device=CPU)
            stages = stages_of(decoder, None)
            if pieces_of is recorded and dtype is torch.bfloat16:
                assert PATTERNS[family] == {name: found[name] for name in PATTERNS[family]}
            scores.append(logits_of_all(decoder, token_ids, stages=stages).double())
        ours, of_code = scores
        assert torch.linalg.vector_norm(ours - of_code) <= bound * torch.linalg.vector_norm(of_code)


class CountedKernels(TorchDispatchMode):
    """Counter of torch operators that compute; views do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_view = any(each.alias_info is not None for each in func._schema.returns)
        self.count += not is_view or func._schema.is_mutable
        return func(*args, **(kwargs or {}))


def test_a_layer_stores_its_keys_and_values_by_one_operator(folders: dict[str, Path]) -> None:
    """The layer uses the device's operator: torch's would take 26 kernels."""
    path, stored = folders["llama"], []
    decoder = load_model(open_checkpoint(path), read_traced(path), dtype=torch.float32, device=CPU)
    operators = SimpleNamespace(**vars(native_operators))
    operators.write_rows = lambda *given: stored.append(given)
    stages, config = TracedStages(decoder, operators), decoder.config
    of = config, 3, decoder.dtype, CPU
    state = State.empty(*of, Scratch.empty(*of))
    stages.embed(torch.ones(3, dtype=torch.int32), torch.arange(3), state)
    caches = torch.zeros(2, 1, 16, config.num_kv_heads, config.head_dim)
    store = Store(torch.arange(3, dtype=torch.int32), *caches)
    counts = []
    for given in (None, store):
        with CountedKernels() as kernels:
            for layer in range(config.num_layers):
                stages.advance(layer, state, given)
        counts.append(kernels.count)
    assert counts[0] == counts[1]
    assert len(stored) == config.num_layers
    _, keys, values = stages.heads(state)
    for found, expected in zip(stored[-1], (keys, values, caches[0], caches[1], store.slots), strict=True):
        assert found.data_ptr() == expected.data_ptr()


def test_an_operator_that_computes_something_else_is_not_used(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = folders["llama"]
    token_ids = torch.arange(9)
    expected = logits_of_all(
        load_model(open_checkpoint(path), ModelConfig.from_pretrained(path), dtype=torch.float32, device=CPU),
        token_ids,
    )
    monkeypatch.setattr(fused.Gate, "forward", lambda _, gate_up: gate_up.chunk(2, -1)[0])
    traced = load_model(open_checkpoint(path), read_traced(path), dtype=torch.float32, device=CPU)
    with caplog.at_level(logging.WARNING):
        found = logits_of_all(traced, token_ids, stages=stages_of(traced, None))
    assert "slower" in caplog.text
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def _awq(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    rounded = grid(weight, group=64)
    return awq(rounded), rounded.exact


def _gptq(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    rounded = grid(weight, group=32)
    return gptq(rounded), rounded.exact


QUANTISED: dict[str, tuple[dict[str, Any], Any]] = {
    "awq": ({"bits": 4, "version": "gemm", "zero_point": True, "group_size": 64}, _awq),
    "gptq": ({"bits": 4, "group_size": 32, "sym": False, "desc_act": False}, _gptq),
    "fp8": ({"weight_block_size": [128, 128]}, lambda weight: fp8(weight, (128, 128), "scale_inv")),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", QUANTISED)
def test_quantised_folders_stand_for_the_same_numbers(tmp_path: Path, name: str) -> None:
    """Matrices kept in their format differ only by the rounding of minima and inputs."""
    path = save(tmp_path / "whole", "phi3", {"hidden_size": 128, "intermediate_size": 128})
    copied = Path(shutil.copytree(path, tmp_path / "quantised"))
    settings, make = QUANTISED[name]
    stored = quantise(copied, settings | {"quant_method": name}, make)
    exact = {weight: each.contiguous() for weight, each in stored.items()}
    save_file(exact, path / "model.safetensors", metadata={"format": "pt"})

    def scores(folder: Path, *, keep: bool) -> torch.Tensor:
        checkpoint = open_checkpoint(folder)
        config = checkpoint.config()
        assert summarize(folder).is_by_transformers
        form = stored_form(check_model(checkpoint, config), config) if keep else DENSE
        decoder = load_model(checkpoint, config, dtype=torch.float32, device=CPU, form=form)
        return logits_of_all(decoder, torch.arange(3, 20), stages=stages_of(decoder, None))

    expected = scores(path, keep=False)
    torch.testing.assert_close(scores(copied, keep=False), expected)
    off = torch.linalg.vector_norm(scores(copied, keep=True) - expected)
    assert off <= 0.1 * torch.linalg.vector_norm(expected)


def test_configurations_are_equal_and_hashed_alike(folders: dict[str, Path]) -> None:
    one, other = (read_traced(folders["phi3"]) for _ in range(2))
    assert one == other
    assert hash(one) == hash(other)
    assert one != read_traced(folders["olmo2"])


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_engine_gives_the_tokens_of_transformers(folders: dict[str, Path], family: str) -> None:
    """Tokens agree for every policy; prompts are computed in chunks."""
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 300, (n,), generator=generator).tolist() for n in (1, 7, 30, 70)]
    attention = "eager" if family == "gemma2" else None  # the default, torch's, ignores the caps
    expected = [transformers_greedy(folders[family], prompt, 16, attention) for prompt in prompts]
    options = EngineOptions(
        model=folders[family],
        device="cpu",
        gpu_cache_tokens=128,
        cpu_cache_tokens=640,
        max_batch_tokens=48,
        max_batch_requests=8,
    )
    loaded = load(options)
    for policy in sorted(POLICIES):
        parts = take_memory(loaded, options)
        with Engine.from_parts(parts, policy, cost_model=machine(cpu_token_ms=1e-6)) as engine:
            outputs = engine.generate(
                prompts, SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
            )
        assert [list(output.token_ids) for output in outputs] == expected, policy


@pytest.mark.parametrize(
    ("model_type", "changes", "said"),
    [
        ("falcon", {"alibi": True}, "ALiBi"),
        ("olmoe", {}, "not multiples of 64"),
        ("jamba", {}, "has Mamba layers of the first version"),
    ],
)
def test_what_cannot_be_cut_is_refused_by_name(
    tmp_path: Path, model_type: str, changes: dict[str, Any], said: str
) -> None:
    sizes = {name: size for name, size in SIZES.items() if model_type != "falcon" or "key_value" not in name}
    CONFIG_MAPPING[model_type](**(sizes | changes)).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=said):
        exported(Source(tmp_path), torch.float32, read_traced(tmp_path).of_model)
