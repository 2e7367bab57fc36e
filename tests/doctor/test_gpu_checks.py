"""The checks of a GPU, run without one: correct kernels pass, wrong ones fail."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import NoReturn

import pytest
from imitated_streams import ImitatedBackend, Operation
from torch import Tensor
from traced_models import FAMILIES, save

from neo_desktop.engine.doctor.outcome import CheckError
from neo_desktop.engine.doctor.trials import Subject
from neo_desktop.engine.execute.backend import ThreadBackend
from neo_desktop.engine.execute.lane import Lane
from neo_desktop.engine.fallbacks import MECHANISMS, fallbacks
from neo_desktop.engine.kernels import dispatch
from neo_desktop.engine.kv import device_layer
from neo_desktop.engine.selfcheck import answers, kernel_checks, kv_checks, offload_checks
from neo_desktop.engine.selfcheck import rig as selfcheck_rig
from neo_desktop.engine.selfcheck.answers import alone
from neo_desktop.engine.selfcheck.check import Check
from neo_desktop.engine.selfcheck.offload_checks import (
    check_copies,
    check_replay,
    check_swap,
    check_trips,
)
from neo_desktop.engine.selfcheck.rig import Rig, on_levels
from neo_desktop.models.config import ModelConfig
from neo_desktop.models.experts_config import ExpertsConfig
from neo_desktop.models.traced.config import read_traced

KERNELS = (
    "row_copy",
    "paged_decode",
    "rope_append",
    "norm",
    "activation",
    "quantised",
    "experts",
    "recurrent",
)


class SmallRig(Rig):
    """A small model with head norms and a sliding window."""

    @cached_property
    def config(self) -> ModelConfig:
        return replace(super().config, qk_norm=True, layer_windows=(None, 9, None))


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keep shapes small: Triton's interpreter takes milliseconds per program."""
    monkeypatch.setattr(device_layer, "num_sms", lambda device: 2)
    monkeypatch.setattr(kv_checks, "LENGTHS", ((1,), (40, 16, 1), (33,)))
    monkeypatch.setattr(kv_checks, "MANY", 2)
    monkeypatch.setattr(kernel_checks, "ROWS", (1, 3, 6))
    monkeypatch.setattr(kernel_checks, "EXPERT_ROWS", (1,))
    monkeypatch.setattr(kernel_checks, "EXPERT_KINDS", (None, "Q8_0"))
    monkeypatch.setattr(kernel_checks, "MOST_HIDDEN", 64)
    monkeypatch.setattr(kernel_checks, "KINDS", {"Q4_K": (1, 17), "Q8_0": (3,)})
    monkeypatch.setattr(kernel_checks, "SPANS", ((0, 2, 0, 3), (2, 3, 2, 2), (3, 36, -1, 1)))
    for name, size in (
        ("KEY_HEADS", 1),
        ("HEADS", 2),
        ("KEY_DIM", 16),
        ("VALUE_DIM", 12),
    ):  # of recurrent layers
        monkeypatch.setattr(kernel_checks, name, size)
    monkeypatch.setattr(selfcheck_rig, "REPEATS", 1)
    monkeypatch.setattr(offload_checks, "SECONDS", {False: 0.1, True: 0.1})
    with fallbacks.at_levels({}):
        yield


@pytest.fixture
def rig() -> SmallRig:
    return SmallRig(Subject(shape="tiny", device="cpu", dtype="float32"))


def checks(rig: Rig) -> dict[str, Check]:
    return {check.name: check for check in kernel_checks.kernel_checks(rig)}


@pytest.mark.parametrize(
    ("kernel", "level"), [(name, level.name) for name in KERNELS for level in MECHANISMS[name].levels]
)
def test_right_kernels_pass(rig: SmallRig, kernel: str, level: str) -> None:
    figures = checks(rig)[f"{kernel}-{level}"].run()
    if kernel != "row_copy":
        assert float(figures["error"]) < 1e-5
        assert float(figures["ms"]) > 0


@pytest.mark.parametrize("level", [level.name for level in MECHANISMS["prompt_attention"].levels])
def test_right_prompt_attention_passes(rig: SmallRig, level: str) -> None:
    assert float(checks(rig)[f"prompt_attention-{level}"].run()["error"]) < 1e-5


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_that_is_a_little_wrong_fails(
    rig: SmallRig, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One element of the output is wrong."""
    module, name, changed = {
        "rope_append": (kernel_checks, "rope_append", 0),
        "norm": (kernel_checks, "add_rms_norm", 4),
        "activation": (kernel_checks, "silu_mul", 1),
        "paged_decode": (device_layer, "paged_decode", 5),
        "row_copy": (device_layer, "read_rows", 0),
        "quantised": (kernel_checks, "multiply_packed", 3),
        "experts": (kernel_checks, "multiply_experts", 5),
        "recurrent": (kernel_checks, "scan_state", 7),
    }[kernel]
    function = getattr(module, name)

    def disturbed(*arguments: Tensor, **options: bool) -> None:
        function(*arguments, **options)
        target = arguments[changed]
        target[-1].view(-1)[3] = target[-1].view(-1)[3] * 1.5 + 0.01

    monkeypatch.setattr(module, name, disturbed)
    with pytest.raises(CheckError, match=r"relative error|other values"):
        checks(rig)[f"{kernel}-torch"].run()


def test_a_kernel_that_gave_up_fails_although_another_served(
    rig: SmallRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_triton(module: str, name: str) -> NoReturn:
        raise RuntimeError("ptxas died")

    monkeypatch.setattr(dispatch, "_in_triton", without_triton)
    with pytest.raises(CheckError, match="ptxas died"):
        checks(rig)["norm-triton"].run()
    assert fallbacks.level("norm") == "triton"  # the check's result lowers the level, not the dispatcher


def no_pause(rng: random.Random) -> None:
    rng.random()


@pytest.mark.parametrize("queues", [None, 2])
def test_flags_and_relay_pass(rig: SmallRig, queues: int | None) -> None:
    backend = ImitatedBackend(1, num_queues=queues)
    assert int(check_trips(rig, backend, no_pause, in_graphs=True)["runs"]) >= 9


def test_streams_copies_and_swaps_pass(rig: SmallRig) -> None:
    check_trips(rig, ThreadBackend(None), no_pause, in_graphs=False)
    check_replay(rig, ImitatedBackend(1))
    for level in ("pinned", "pageable"):
        check_copies(rig, level)
    check_swap(rig)


class LossyBackend(ImitatedBackend):
    """Loses the first copy back of every program."""

    def enqueue(self, operations: Sequence[Operation]) -> None:
        copies = [o for o in operations if o.lane is Lane.TO_DEVICE and o.stage.name == "offload"]
        copies[0].work = lambda: None
        super().enqueue(operations)


def test_lost_hand_overs_fail(rig: SmallRig) -> None:
    with pytest.raises(CheckError, match="from the CPU"):
        check_trips(rig, LossyBackend(1), no_pause, in_graphs=True)


@pytest.mark.parametrize(
    ("mechanism", "level"),
    [(name, level.name) for name, mechanism in MECHANISMS.items() for level in mechanism.levels],
)
def test_answers_by_a_rung_alone_are_given_by_that_rung(mechanism: str, level: str) -> None:
    """All other mechanisms are on their lowest level, except what the tested level requires."""
    with on_levels(alone(mechanism, level, MECHANISMS)):
        assert fallbacks.level(mechanism) == level


def test_answers_of_a_quick_shape_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    experts = ExpertsConfig(16, 2, 128, (0, 1, 2))

    class LargeRig(Rig):
        @cached_property
        def config(self) -> ModelConfig:
            return replace(
                super().config,
                experts=experts,
                num_layers=3,
                layer_windows=(None,) * 3,
                hidden_size=64,
                vocab_size=100_000,
                eos_token_ids=(99_999,),
            )

    monkeypatch.setattr(answers, "QUICK_VOCABULARY", 512)
    found = answers.AnswerChecks(
        LargeRig(Subject(shape="tiny", device="cpu", dtype="float32", is_quick=True))
    ).reference
    assert [len(each.token_ids) for each in found] == [answers.ANSWER_TOKENS] * len(answers.PROMPT_TOKENS)


def test_a_quick_check_takes_the_attention_of_a_traced_model(tmp_path: Path) -> None:
    folder = save(tmp_path, *FAMILIES["gemma4-moe"])
    checks = answers.AnswerChecks(
        Rig(Subject(model=str(folder), device="cpu", dtype="float32", is_quick=True))
    )
    ours, theirs = checks.model.config, read_traced(folder)
    assert (ours.num_heads, ours.num_kv_heads) == (theirs.num_heads, theirs.num_kv_heads)
    assert (ours.head_dim, ours.attention_softcap) == (theirs.head_dim, theirs.attention_softcap)
    assert all(len(each.token_ids) == answers.ANSWER_TOKENS for each in checks.answer("gpu-only"))
