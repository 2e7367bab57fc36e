"""KV that comes back from disk: the same tokens, and no computation of the prefix."""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints import VOCAB_SIZE
from cost_models import machine
from idle import assert_is_idle
from kv_invariants import check_kv
from recurrent_models import RECURRENT
from seeds import first
from traced_models import save

from neo_desktop import Engine, SamplingParams
from neo_desktop.engine.cache_files import cache_folder, digest
from neo_desktop.engine.fallbacks import fallbacks
from neo_desktop.engine.generate import Completion
from neo_desktop.engine.kv.disk import BlockStore
from neo_desktop.engine.setup import key_of

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


def prompts(lengths: list[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]


STATE_CHATS = [[token % 300 for token in chat] for chat in prompts([90, 40, 64])]
CHATS = prompts([150, 200, 33, 90, 180])


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NEO_DESKTOP_CACHE", str(tmp_path))
    return cache_folder("kv")


def engine(checkpoint: Path, policy: str = "gpu-only", gib: float = 0.1, **options: Any) -> Engine:
    cost_model = None if policy == "gpu-only" else machine(cpu_token_ms=1e-6, offload_ms=0.0, token_ms=1.0)
    return Engine.from_pretrained(
        checkpoint, device="cpu", policy=policy, disk_cache_gib=gib, cost_model=cost_model, **options
    )


def tokens(completions: list[Completion]) -> list[tuple[int, ...]]:
    return [each.token_ids for each in completions]


POLICIES: list[tuple[str, dict[str, Any]]] = [
    ("gpu-only", {}),
    ("fastdecode", {}),
    ("fastdecode", {"cpu_cache_dtype": "int8"}),
    ("pie", {"gpu_cache_tokens": 320, "swap_cache_tokens": 1000}),
    ("auto", {"gpu_cache_tokens": 320, "cpu_cache_tokens": 1000}),
    ("neo", {"gpu_cache_tokens": 320, "cpu_cache_tokens": 1000}),
]


@pytest.mark.sample(3)
@pytest.mark.parametrize(("policy", "options"), POLICIES)
@pytest.mark.parametrize("family", ["llama", "gpt-oss", "mistral-window"])
def test_tokens_are_the_same_after_a_restart(
    checkpoints: dict[str, Path], family: str, policy: str, options: dict[str, Any]
) -> None:
    with engine(checkpoints[family], policy, **options) as first:
        for _ in range(2):  # the second time, the cache has the prefixes, in 8 bits with their rounding
            expected = tokens([first.generate([chat], GREEDY)[0] for chat in CHATS])
        assert_is_idle_after_writes(first)
    with engine(checkpoints[family], policy, **options) as second:
        again = [second.generate([chat], GREEDY)[0] for chat in CHATS]
        stats = second.stats()
    assert tokens(again) == expected
    assert [each.num_cached_tokens for each in again] == [(len(chat) - 1) // 16 * 16 for chat in CHATS]
    assert stats.disk.num_hit_tokens == sum(each.num_cached_tokens for each in again)
    assert stats.disk.read_bytes > 0


def assert_is_idle_after_writes(engine: Engine) -> None:
    """Wait for the blocks that are being written, which are held."""
    while engine._kv_cache.disk.wait():
        engine.rest()
    assert_is_idle(engine)
    check_kv(engine._kv_cache)


@pytest.mark.sample(1)
@pytest.mark.parametrize("policy", ["gpu-only", "auto", "pie"])
@pytest.mark.parametrize("family", first(sorted(RECURRENT, key=lambda family: family != "granite-4-h")))
def test_recurrent_states_come_back_as_checkpoints(family: str, policy: str, tmp_path: Path) -> None:
    folder = save(tmp_path / family, *RECURRENT[family])
    with engine(folder, policy) as first:
        expected = [first.generate([chat], GREEDY)[0].token_ids for chat in STATE_CHATS]
    continued = [[*chat, *answer] for chat, answer in zip(STATE_CHATS, expected, strict=True)]
    with engine(folder, policy, gib=0) as without:
        next_answers = [without.generate([chat], GREEDY)[0].token_ids for chat in continued]
    with engine(folder, policy) as second:
        again = [second.generate([chat], GREEDY)[0] for chat in STATE_CHATS]
        then = [second.generate([chat], GREEDY)[0] for chat in continued]
        assert_is_idle_after_writes(second)
        hits = second.stats().disk.num_hit_tokens
    assert tokens(again) == expected
    assert tokens(then) == next_answers
    assert [each.num_cached_tokens for each in again] == [(len(chat) - 1) // 16 * 16 for chat in STATE_CHATS]
    assert hits >= sum(each.num_cached_tokens for each in again)


def test_chats_in_turn_come_back_from_disk(checkpoints: dict[str, Path]) -> None:
    """The cache holds two of five chats; each continues with what was said before."""
    with engine(checkpoints["llama"], gpu_cache_tokens=512, gib=0) as without:
        expected = tokens([without.generate([chat], GREEDY)[0] for chat in CHATS])
    with engine(checkpoints["llama"], gpu_cache_tokens=512) as with_disk:
        for turn in range(3):
            for chat, answer in zip(CHATS, expected, strict=True):
                (got,) = with_disk.generate([chat], GREEDY)
                assert got.token_ids == answer
                assert got.num_cached_tokens == (0 if turn == 0 else (len(chat) - 1) // 16 * 16)
                assert_is_idle_after_writes(with_disk)
        assert with_disk.stats().disk.num_hit_tokens > 0


@pytest.fixture
def may_read(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """The event that reads from disk wait for."""
    may_read, read = threading.Event(), BlockStore.read
    monkeypatch.setattr(BlockStore, "read", lambda *given: may_read.wait(30) and read(*given))
    return may_read


def test_requests_run_while_another_one_waits_for_the_disk(
    checkpoints: dict[str, Path], may_read: threading.Event
) -> None:
    with engine(checkpoints["llama"]) as first:
        (expected,) = first.generate([CHATS[0]], GREEDY)
    with engine(checkpoints["llama"]) as second:
        params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
        second.add("runs", second.prepare(CHATS[2], params))
        second.step()
        second.add("waits", second.prepare(CHATS[0], GREEDY))
        outputs = [output for _ in range(20) for output in second.step()]
        assert {output.request_id for output in outputs} == {"runs"}
        assert sum(len(output.tokens) for output in outputs) >= 15
        may_read.set()
        while second.has_work:
            outputs += second.step()
        waited = [output for output in outputs if output.request_id == "waits"]
        assert tuple(token.token_id for each in waited for token in each.tokens) == expected.token_ids
        assert waited[-1].num_cached_tokens == 144


def test_a_request_may_end_while_it_waits_for_the_disk(
    checkpoints: dict[str, Path], may_read: threading.Event
) -> None:
    with engine(checkpoints["llama"]) as first:
        (expected,) = first.generate([CHATS[0]], GREEDY)
    with engine(checkpoints["llama"]) as second:
        second.add("ends", second.prepare(CHATS[0], GREEDY))
        for _ in range(3):
            second.step()
        second.abort("ends")
        assert not second.has_requests
        may_read.set()
        assert_is_idle_after_writes(second)
        (again,) = second.generate([CHATS[0]], GREEDY)
    assert again.token_ids == expected.token_ids


def test_a_damaged_block_is_computed_with_all_later_ones(
    checkpoints: dict[str, Path], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with engine(checkpoints["llama"]) as first:
        (expected,) = first.generate([CHATS[0]], GREEDY)
    files = sorted(folder.rglob("*"), key=lambda path: (path.is_file(), -path.stat().st_mtime_ns))
    third = [path for path in files if path.is_file()][2]
    third.write_bytes(third.read_bytes()[:-1])
    with engine(checkpoints["llama"]) as second:
        (again,) = second.generate([CHATS[0]], GREEDY)
    assert again.token_ids == expected.token_ids
    assert again.num_cached_tokens == 32
    assert len([each for each in caplog.messages if "dropped" in each]) == 1


def test_two_engines_share_a_folder(checkpoints: dict[str, Path]) -> None:
    with engine(checkpoints["llama"]) as one, engine(checkpoints["llama"]) as other:
        expected = one.generate(CHATS, GREEDY)
        assert tokens(other.generate(CHATS, GREEDY)) == tokens(expected)
    with engine(checkpoints["llama"]) as third:
        again = third.generate(CHATS, GREEDY)
    assert tokens(again) == tokens(expected)
    assert all(each.num_cached_tokens for each in again)


def test_another_dtype_or_changed_weights_find_nothing(checkpoints: dict[str, Path]) -> None:
    with engine(checkpoints["llama"]) as first:
        first.generate(CHATS, GREEDY)
    with engine(checkpoints["llama"], dtype="bfloat16") as second:
        assert not any(each.num_cached_tokens for each in second.generate(CHATS, GREEDY))
    for path in checkpoints["llama"].glob("*.safetensors"):
        path.touch()
    with engine(checkpoints["llama"]) as third:
        assert not any(each.num_cached_tokens for each in third.generate(CHATS, GREEDY))


def test_kernels_that_round_differently_share_no_blocks() -> None:
    config = SimpleNamespace(kv_parts=2)
    decoder = SimpleNamespace(device=torch.device("cuda"), dtype=torch.float16, linears=list, config=config)
    model: Any = SimpleNamespace(identity="a model", decoder=decoder)
    keys = []
    for level in ("integers", "exact", "torch"):
        with fallbacks.at_levels({"quantised": level}):
            keys.append(digest(key_of(model)))
    assert len(set(keys)) == 3


def test_blocks_that_are_faster_to_compute_stay_on_disk(checkpoints: dict[str, Path]) -> None:
    for weights_ms, is_read in ((0.4, True), (1e-9, False)):
        cost_model = machine(weights_ms=weights_ms, token_ms=weights_ms, gpu_token_ms=0.0)
        for _ in range(2):
            with Engine.from_pretrained(
                checkpoints["llama"], device="cpu", disk_cache_gib=0.1, cost_model=cost_model
            ) as made:
                made._kv_cache.disk._bytes_per_s = 1e8  # type: ignore[attr-defined]
                (completion,) = made.generate([CHATS[0]], GREEDY)
        assert bool(completion.num_cached_tokens) == is_read


def test_off_leaves_no_folder(checkpoints: dict[str, Path], folder: Path) -> None:
    with engine(checkpoints["llama"], gib=0) as made:
        made.generate(CHATS, GREEDY)
    assert not folder.exists()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("policy", ["gpu-only", "fastdecode", "auto", "pie"])
def test_on_a_gpu_tokens_are_the_same_after_a_restart(checkpoints: dict[str, Path], policy: str) -> None:
    sizes = {"gpu_cache_tokens": 640, "cpu_cache_tokens": 1000, "swap_cache_tokens": 1000}
    answers = []
    for _ in range(2):
        with Engine.from_pretrained(
            checkpoints["llama"], device="cuda", dtype="float32", policy=policy, disk_cache_gib=0.1, **sizes
        ) as made:
            made._kv_cache.disk._compute_ms = lambda begin, end: torch.inf  # type: ignore[attr-defined]
            answers.append([made.generate([chat], GREEDY)[0] for chat in CHATS])
    assert tokens(answers[1]) == tokens(answers[0])
    assert all(each.num_cached_tokens for each in answers[1])
