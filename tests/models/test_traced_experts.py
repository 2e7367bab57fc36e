"""Traced models with experts in host memory give the tokens of transformers, or of the whole model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import transformers_greedy
from gguf_hybrids import LARGE, write_hybrid
from recurrent_models import GRANITE_MOE, RECURRENT
from traced_models import FAMILIES, save

from neo_desktop.engine.engine import Engine
from neo_desktop.engine.predict.weight_plan import EXPERTS, layer_matrices, least_gpu_bytes
from neo_desktop.engine.profiling.iteration_timer import IterationTimer
from neo_desktop.engine.sampling_params import SamplingParams
from neo_desktop.models.checkpoint import open_checkpoint
from neo_desktop.models.linear.dense import Dense
from neo_desktop.models.linear.offloaded import OffloadedLinear
from neo_desktop.models.linear.shares import StreamedShares
from neo_desktop.models.registry import stages_of
from neo_desktop.models.traced.config import TracedConfig, read_traced

PLAIN = Dense(uses_tiles=False)
KNOWN = FAMILIES | RECURRENT | {"granite-4-h-moe": GRANITE_MOE}
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
PROMPTS = [
    torch.randint(3, 300, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (3, 40, 17, 70)
]


@pytest.fixture
def share_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Set the streamed share of experts for five or more rows; the CPU computes fewer rows."""

    def set_share(share: float) -> None:
        def fixed(timer: IterationTimer, max_rows: int, seconds: float) -> None:
            timer._decoder.streamed_experts = StreamedShares((4, 5), (0.0, share))

        monkeypatch.setattr(IterationTimer, "measure_shares", fixed)

    return set_share


def gib_with_half_of_the_experts(config: TracedConfig) -> float:
    matrices = layer_matrices(config, PLAIN, torch.float32)
    experts = sum(sizes.device_bytes for name, sizes in matrices.items() if name.endswith(EXPERTS))
    return (config.weight_bytes(torch.float32, PLAIN) - experts // 2) / 2**30


def engine_of(path: Path, gib: float | None, policy: str = "auto") -> Engine:
    options: dict[str, Any] = {"max_batch_tokens": 32, "max_batch_requests": 8, "gpu_cache_tokens": 320}
    cpu_tokens = 0 if policy == "gpu-only" else 1000
    return Engine.from_pretrained(
        path, device="cpu", policy=policy, gpu_weights_gib=gib, cpu_cache_tokens=cpu_tokens, **options
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize("policy", ["gpu-only", "neo", "auto"])
@pytest.mark.parametrize("family", ["qwen3.5-moe", "gemma4-moe", "granite-4-h-moe", "nemotron-h-moe"])
def test_tokens_are_those_of_transformers(
    family: str, policy: str, share_of: Callable[[float], None], tmp_path: Path
) -> None:
    """Stages of hybrids have several mixtures of experts."""
    share_of(0.5)
    path = save(tmp_path, *KNOWN[family])
    with engine_of(path, gib_with_half_of_the_experts(read_traced(path)), policy) as engine:
        assert stages_of(engine._decoder, None).divided_experts
        for prompts in (PROMPTS[:1], PROMPTS):
            found = [list(each.token_ids) for each in engine.generate(prompts, GREEDY)]
            assert found == [transformers_greedy(path, prompt, 12) for prompt in prompts]


@pytest.mark.sample(0)
@pytest.mark.parametrize("family", ["qwen3.5 moe", "gemma4 moe"])
def test_quantised_experts_give_the_tokens_of_the_whole_model(
    family: str, share_of: Callable[[float], None], tmp_path: Path
) -> None:
    share_of(0.0)  # the device would multiply streamed experts with inputs that are not rounded
    path, _ = write_hybrid(tmp_path, family, "Q4_K", sizes=LARGE)
    with engine_of(path, None) as engine:
        expected = [each.token_ids for each in engine.generate(PROMPTS, GREEDY)]
        experts = sum(
            matrix.memory()[torch.device("cpu")]
            for name, matrix in engine._decoder.matrices.items()
            if "experts_" in name
        )
        gib = (engine._decoder.nbytes - experts / 2) / 2**30
    with engine_of(path, gib) as engine:
        assert stages_of(engine._decoder, None).divided_experts
        split = [each for each in engine._decoder.matrices.values() if isinstance(each, OffloadedLinear)]
        assert any(each.form == "split" and each.host.form == "Q4_K" for each in split)
        assert [each.token_ids for each in engine.generate(PROMPTS, GREEDY)] == expected


def test_mixtures_of_another_width_stay_on_the_device(tmp_path: Path) -> None:
    """The router's rows are projected to a latent before the experts."""
    path, _ = write_hybrid(tmp_path, "nemotron-h moe latent", sizes=LARGE | {"moe_latent_size": 128})
    config = open_checkpoint(path).config()
    experts = {name for name, matrix in config.each_matrix() if matrix.experts}
    assert experts
    assert not experts & layer_matrices(config, PLAIN, torch.float32).keys()
    assert least_gpu_bytes(config, PLAIN, torch.float32) > sum(
        4 * matrix.num_weights for name, matrix in config.each_matrix() if name in experts
    )
