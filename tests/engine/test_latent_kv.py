"""KV of latent attention: keys whose first numbers are the values, in every cache."""

from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from checkpoints import transformers_greedy
from cost_models import machine
from fallback_levels import kernels_on
from idle import assert_is_idle
from seeds import first
from traced_models import FAMILIES, LATENT, SIZES, save
from workers import running_worker

from neo_desktop import Engine, SamplingParams
from neo_desktop.engine.kv.layer import block_bytes
from neo_desktop.engine.kv.layout import BLOCK_SIZE
from neo_desktop.engine.remote import session
from neo_desktop.engine.remote.session import GpuLayer
from neo_desktop.models.traced.config import read_traced

GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
WIDTH = LATENT["kv_lora_rank"] + LATENT["qk_rope_head_dim"]
COST = machine(cpu_token_ms=1e-6, offload_ms=0.0)
# The caches are too small for all requests: they move, wait or are preempted.
CACHES: list[tuple[str, dict[str, int]]] = [
    ("gpu-only", {"gpu_cache_tokens": 192}),
    ("fastdecode", {"cpu_cache_tokens": 192}),
    ("pie", {"gpu_cache_tokens": 128, "swap_cache_tokens": 320}),
    ("auto", {"gpu_cache_tokens": 128, "cpu_cache_tokens": 320}),
]


@pytest.fixture(scope="module", params=first(["deepseek-v3", "glm4-moe-lite"]))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("latent") / request.param, *FAMILIES[request.param])


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEO_DESKTOP_CACHE", str(tmp_path))


def prompts() -> list[list[int]]:
    """Return prompts, some of which begin alike."""
    generator = torch.Generator().manual_seed(3)
    start, *ends = (torch.randint(3, 300, (n,), generator=generator).tolist() for n in (50, 1, 9, 30, 60))
    return [ends[0], ends[3], *(start + end for end in ends)]


def answers(engine: Engine) -> list[list[int]]:
    """Return the tokens of the prompts, answered at once."""
    tokens = [list(each.token_ids) for each in engine.generate(prompts(), GREEDY)]
    disk = engine._kv_cache.disk
    while disk is not None and disk.wait():  # blocks that are being written are held
        engine.rest()
    assert_is_idle(engine)
    return tokens


def expected(folder: Path) -> list[list[int]]:
    return [transformers_greedy(folder, prompt, GREEDY.max_tokens) for prompt in prompts()]


def test_a_token_takes_one_row_per_layer(folder: Path) -> None:
    config = read_traced(folder)
    assert (config.kv_parts, config.head_dim) == (1, WIDTH)
    row_bytes = 2 * WIDTH
    assert config.kv_bytes_per_token(torch.bfloat16) == SIZES["num_hidden_layers"] * row_bytes
    assert block_bytes(config, BLOCK_SIZE, torch.bfloat16) == BLOCK_SIZE * row_bytes
    assert block_bytes(config, BLOCK_SIZE, torch.int8) == BLOCK_SIZE * (WIDTH + 4)


@pytest.mark.sample(2)
@pytest.mark.parametrize(("policy", "caches"), CACHES)
def test_tokens_are_those_of_transformers_in_small_caches(
    folder: Path, policy: str, caches: dict[str, int]
) -> None:
    """The second time, prompts begin with cached blocks; after a restart, with blocks from disk."""
    given = {"device": "cpu", "policy": policy, "max_batch_tokens": 48, "disk_cache_gib": 0.1, **caches}
    cost_model = None if policy == "gpu-only" else COST
    with Engine.from_pretrained(folder, cost_model=cost_model, **given) as engine:
        assert answers(engine) == expected(folder)
        assert answers(engine) == expected(folder)
    with Engine.from_pretrained(folder, cost_model=cost_model, **given) as again:
        assert answers(again) == expected(folder)
        assert again.stats().disk.num_hit_tokens > 0


@pytest.mark.parametrize("attends_as_gpu", [False, True])
def test_a_worker_stores_and_attends_to_the_same_rows(
    folder: Path, secret: Path, monkeypatch: pytest.MonkeyPatch, attends_as_gpu: bool
) -> None:
    """A worker with a GPU is imitated by torch's operators."""
    with ExitStack() as stack:
        if attends_as_gpu:
            monkeypatch.setattr(session, "HostLayer", GpuLayer)
            stack.enter_context(kernels_on("torch"))
        _, address = stack.enter_context(running_worker())
        given = {"device": "cpu", "policy": "neo", "gpu_cache_tokens": 128, "cpu_cache_tokens": 0}
        given |= {"workers": str(address), "worker_secret": secret, "cost_model": COST}
        engine = stack.enter_context(Engine.from_pretrained(folder, **given))
        assert answers(engine) == expected(folder)
        assert engine.stats().num_cpu_decodes > 0


def test_an_8_bit_cache_comes_back_from_disk_as_it_was(folder: Path) -> None:
    given = {"device": "cpu", "policy": "fastdecode", "cpu_cache_dtype": "int8", "cost_model": COST}
    chats = [prompt for prompt in prompts() if len(prompt) > BLOCK_SIZE]

    def chat(engine: Engine) -> list[tuple[int, ...]]:
        return [engine.generate([each], GREEDY)[0].token_ids for each in chats]

    with Engine.from_pretrained(folder, disk_cache_gib=0.1, **given) as engine:
        chat(engine)
        rounded = chat(engine)  # from prefixes with their rounding
        while engine._kv_cache.disk.wait():
            engine.rest()
    with Engine.from_pretrained(folder, disk_cache_gib=0.1, **given) as again:
        assert chat(again) == rounded
        assert again.stats().disk.num_hit_tokens > 0
