"""What an engine without work has left."""

from neo_desktop import Engine


def assert_is_idle(engine: Engine) -> None:
    """No request is there, and no block is used."""
    stats = engine.stats()
    assert stats.num_running == stats.num_waiting == 0
    assert all(pool.num_used_blocks == 0 for pool in stats.pools.values())
