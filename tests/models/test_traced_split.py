"""Traced models with matrices on the device and in host memory."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from checkpoints import transformers_greedy
from dense_model import logits_of_all
from offloaded_case import multiply_in_parts, random_split
from seeds import first, seeds
from torch import Tensor
from traced_models import FAMILIES, save

from neo_desktop.engine.engine import Engine
from neo_desktop.engine.sampling_params import SamplingParams
from neo_desktop.models.checkpoint import open_checkpoint
from neo_desktop.models.linear.dense import DENSE, Dense
from neo_desktop.models.linear.offloaded import OffloadedFormat
from neo_desktop.models.ops import Product
from neo_desktop.models.registry import load_model, stages_of
from neo_desktop.models.stages import Step
from neo_desktop.models.state import Scratch, State
from neo_desktop.models.traced.config import read_traced
from neo_desktop.models.traced.decoder import TracedDecoder

CPU = torch.device("cpu")
PLAIN = Dense(uses_tiles=False)  # the weight layout of a GPU
# The first family's first turn has matmuls before attention that are not queries, keys and values.
SPLIT = ("stablelm-parallel", "llama", "opt", "phi3", "falcon")


@pytest.fixture(scope="module", params=first(SPLIT))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp(request.param), *FAMILIES.get(request.param, (request.param, {})))


def load(folder: Path, form: OffloadedFormat | Dense = DENSE) -> TracedDecoder:
    checkpoint = open_checkpoint(folder)
    model = load_model(checkpoint, read_traced(folder), dtype=torch.float32, device=CPU, form=form)
    assert isinstance(model, TracedDecoder)
    return model


def products_of(steps: Iterator[Step], share: float) -> list[str]:
    """Collect all steps before the first one runs, as lanes do; return the matmuls' names."""
    taken, names = list(steps), []
    for step in taken:
        if step.work is not None:
            step.work()
        if isinstance(step.cut, Product):
            product = step.cut
            assert product.x.is_contiguous()
            product.out.fill_(torch.nan)
            multiply_in_parts(product.linear, product.x, product.out, share)
            names.append(product.name)
    return names


def logits_in_steps(model: TracedDecoder, token_ids: Tensor, share: float) -> Tensor:
    stages, seen = stages_of(model, None), list[tuple[int, str]]()
    undivided, turns = stages.advance, {turn for turn, _ in stages.offloaded_matrices}

    def advance(turn: int, state: State, store: object = None) -> None:
        if turn not in turns:
            undivided(turn, state)
            return
        seen.extend((turn, name) for name in products_of(stages.steps(turn, state), share))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stages, "advance", advance)
        logits = logits_of_all(model, token_ids, stages=stages)
    assert seen == list(stages.offloaded_matrices)
    return logits


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", seeds(2, 3))
def test_steps_compute_what_undivided_stages_do(folder: Path, seed: int) -> None:
    token_ids = torch.randint(0, 300, (20,), generator=torch.Generator().manual_seed(seed))
    whole = load(folder)
    expected = logits_of_all(whole, token_ids, stages=stages_of(whole, None))
    form = random_split(whole.config, seed, device_form=PLAIN, host_form=DENSE)
    if seed == 0:  # offload all rows
        form = OffloadedFormat(PLAIN, DENSE, dict.fromkeys(form.resident_rows, 0))
    model = load(folder, form)
    assert model.has_splits
    for share in (0.0, 0.4, 1.0):
        torch.testing.assert_close(logits_in_steps(model, token_ids, share), expected, rtol=1e-4, atol=1e-4)
    at_once = logits_of_all(model, token_ids, stages=stages_of(model, None))
    torch.testing.assert_close(at_once, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.sample(1)
@pytest.mark.parametrize("policy", ["gpu-only", "neo", "auto"])
def test_tokens_are_those_of_transformers(folder: Path, policy: str) -> None:
    """The device holds the requested part of the weights; measurements decide the division."""
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 300, (n,), generator=generator).tolist() for n in (3, 40, 17, 70)]
    model = load(folder)
    matrices = sum(matrix.num_weights for _, matrix in model.config.each_matrix())
    with Engine.from_pretrained(
        folder,
        device="cpu",
        policy=policy,
        gpu_weights_gib=(model.nbytes - 2 * matrices) / 2**30,
        gpu_cache_tokens=320,
        cpu_cache_tokens=0 if policy == "gpu-only" else 1000,
        max_batch_tokens=32,
        max_batch_requests=8,
    ) as engine:
        params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
        outputs = engine.generate(prompts, params)
    assert [list(each.token_ids) for each in outputs] == [
        transformers_greedy(folder, prompt, 12) for prompt in prompts
    ]


@pytest.mark.sample(0)
def test_memory_of_products_grows_and_is_kept(folder: Path) -> None:
    """The device may still use a buffer that became too small."""
    config = read_traced(folder)
    resident = {name: 0 for name, _ in config.each_matrix()} | {"head": 300}
    model = load(folder, OffloadedFormat(PLAIN, DENSE, resident))
    stages, found = stages_of(model, None), []
    for rows in (2, 5, 3):
        of = config, rows, torch.float32, CPU
        state = State.empty(*of, Scratch.empty(*of))
        last = [each.cut for each in stages.steps(0, state) if each.cut is not None][-1]
        assert isinstance(last, Product)
        found.append(last.x)
        assert found[-1].shape == (rows, last.linear.columns)
    places = [each.untyped_storage().data_ptr() for each in found]
    assert places[0] != places[1] == places[2]
