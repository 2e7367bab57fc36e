"""An engine with streamed KV gives the same tokens."""

import pytest
from tiny_engine import engine, tokens_of

from neo_desktop.engine.kv.streamed import StreamedPool
from neo_desktop.engine.kv_tier import KVTier
from neo_desktop.engine.schedule.policies import POLICIES, Policy

ALL = (KVTier.DEVICE, KVTier.STREAMED, KVTier.HOST)


@pytest.fixture(autouse=True)
def _nothing_is_bridged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise KV of this size would come in one piece."""
    monkeypatch.setattr(StreamedPool, "bridged_bytes", 0)


@pytest.mark.parametrize("tiers", [(KVTier.STREAMED,), (KVTier.DEVICE, KVTier.STREAMED), ALL], ids=len)
def test_an_engine_gives_the_same_tokens_whichever_places_it_has(
    monkeypatch: pytest.MonkeyPatch, tiers: tuple[KVTier, ...]
) -> None:
    monkeypatch.setitem(POLICIES, "with swapped KV", Policy("with swapped KV", tiers))
    with engine("gpu-only", "cpu") as made:
        expected = tokens_of(made)
    with engine("with swapped KV", "cpu", tiers) as made:
        assert tokens_of(made) == expected


@pytest.mark.parametrize("policy", ["pie", "auto"])
def test_policies_that_swap_give_the_same_tokens(policy: str) -> None:
    with engine("gpu-only", "cpu") as made:
        expected = tokens_of(made)
    with engine(policy, "cpu") as made:
        assert tokens_of(made) == expected
