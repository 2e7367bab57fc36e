"""A second GPU in an engine, imitated by this computer: found, measured, used, and the same tokens."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from neo_desktop.engine.engine import Engine
from neo_desktop.engine.kv import peer
from neo_desktop.engine.ladder import ladder
from neo_desktop.engine.options import EngineOptions
from neo_desktop.engine.parts import set_up
from neo_desktop.engine.placement import Place
from neo_desktop.engine.profiling.peer import measured_peers
from neo_desktop.engine.sampling_params import SamplingParams
from neo_desktop.engine.second_gpu import check_second_gpu, second_gpu, with_second_gpu

CPU = torch.device("cpu")
GREEDY = SamplingParams(max_tokens=20, temperature=0.0)


@pytest.mark.parametrize("policy", ["gpu-only", "neo", "auto"])
def test_answers_are_the_same_with_chats_on_a_second_gpu(checkpoints: dict[str, Path], policy: str) -> None:
    asked = [[3 + (7 * i + j) % 250 for j in range(5 + 23 * i)] for i in range(8)]
    options = EngineOptions(
        model=checkpoints["llama"], device="cpu", policy=policy, gpu_cache_tokens=256, cpu_cache_tokens=64
    )
    with Engine.from_pretrained(checkpoints["llama"], device="cpu", policy="gpu-only") as engine:
        expected = [output.token_ids for output in engine.generate(asked, GREEDY)]
    parts = with_second_gpu(set_up(options), CPU, 1 << 22)
    with Engine.from_parts(parts, policy) as engine:
        seen = set[Place]()
        for i, prompt in enumerate(asked):
            engine.add(str(i), engine.prepare(prompt, GREEDY))
        found: dict[str, list[int]] = {str(i): [] for i in range(len(asked))}
        while engine.has_work:
            for output in engine.step():
                found[output.request_id] += [token.token_id for token in output.tokens]
            seen |= {place for place, usage in engine.stats().pools.items() if usage.num_used_blocks}
        assert Place.PEER in seen
    assert [tuple(tokens) for tokens in found.values()] == expected


def test_what_its_attention_takes_is_measured(checkpoints: dict[str, Path]) -> None:
    options = EngineOptions(model=checkpoints["llama"], device="cpu", policy="gpu-only", gpu_cache_tokens=256)
    parts = with_second_gpu(set_up(options), CPU, 1 << 22)
    ((place, surface),) = measured_peers(parts.storage, parts.model.decoder).items()
    assert place == Place.PEER
    assert 0 < surface(1, 64) <= surface(64, 1024)


def test_too_little_memory_is_told(checkpoints: dict[str, Path]) -> None:
    parts = set_up(EngineOptions(model=checkpoints["llama"], device="cpu", gpu_cache_tokens=256))
    with pytest.raises(MemoryError, match="leave --peer-gpu out"):
        with_second_gpu(parts, CPU, 1000)


def test_a_gpu_that_cannot_be_the_second_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert second_gpu(1, torch.device("cuda")) == torch.device("cuda", 1)
    for index, device, reason in (
        (0, "cuda", "another GPU than the model's"),
        (2, "cuda", "there is no GPU 2"),
        (1, "cuda:1", "another GPU than the model's"),
        (1, "cpu", "would run on the CPU"),
    ):
        with pytest.raises(ValueError, match=reason):
            second_gpu(index, torch.device(device))


def test_bytes_that_do_not_arrive_take_the_way_through_host_memory(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As with an IOMMU between the cards: no error, and zeros."""
    copy = peer.copy_across

    def broken(source: Tensor, target: Tensor) -> None:
        if ladder.rung("peer_copies") == "through-host":
            copy(source, target)

    monkeypatch.setattr(peer, "copy_across", broken)
    parts = set_up(EngineOptions(model=checkpoints["llama"], device="cpu", gpu_cache_tokens=256))
    assert Place.PEER in with_second_gpu(parts, CPU, 1 << 22).num_blocks
    assert ladder.limits() == {"peer_copies": "through-host"}
    assert "of 1 bytes that were copied not all arrived; an IOMMU" in caplog.text


def test_a_copy_that_is_refused_takes_that_way_too(monkeypatch: pytest.MonkeyPatch) -> None:
    copy = peer.copy_across

    def refused(source: Tensor, target: Tensor) -> None:
        if ladder.rung("peer_copies") == "direct":
            raise RuntimeError("CUDA error: peer access is not supported between these two devices")
        copy(source, target)

    monkeypatch.setattr(peer, "copy_across", refused)
    check_second_gpu(CPU, CPU)
    assert ladder.limits() == {"peer_copies": "through-host"}


def test_where_no_way_works_the_start_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "copy_across", lambda source, target: None)
    with pytest.raises(RuntimeError, match="leave --peer-gpu out"):
        check_second_gpu(CPU, CPU)
