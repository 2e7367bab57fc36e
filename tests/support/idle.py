"""Checks of an idle engine."""

from neo_desktop import Engine


def assert_is_idle(engine: Engine) -> None:
    """Assert that no request exists and no block is used."""
    stats = engine.stats()
    assert stats.num_running == stats.num_waiting == 0
    assert all(pool.num_used_blocks == 0 for pool in stats.pools.values())
