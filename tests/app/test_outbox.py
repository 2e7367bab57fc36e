"""Many calls at once leave the event loop time for others."""

import asyncio

from neo_desktop.app.outbox import CALLS_PER_TURN, Outbox
from neo_desktop.app.web.http_protocol import Turnstile


async def turns() -> None:
    """Let the event loop do what is due."""
    for _ in range(3):
        await asyncio.sleep(0)


def test_calls_are_made_in_order_and_a_few_per_turn() -> None:
    async def scenario() -> tuple[list[int], list[int]]:
        outbox = Outbox(asyncio.get_running_loop())
        made: list[int] = []
        seen: list[int] = []
        await asyncio.to_thread(lambda: outbox.put(lambda i=i: made.append(i) for i in range(500)))
        outbox.put(lambda i=i: made.append(i) for i in range(500, 1000))
        while len(made) < 1000:
            seen.append(len(made))
            await asyncio.sleep(0)
        return made, seen

    made, seen = asyncio.run(scenario())
    assert made == list(range(1000))
    assert max(b - a for a, b in zip(seen, [*seen[1:], 1000], strict=True)) <= CALLS_PER_TURN


def test_calls_for_a_loop_that_is_closed_are_dropped() -> None:
    loop = asyncio.new_event_loop()
    outbox = Outbox(loop)
    loop.close()
    outbox.put([lambda: None])


def test_the_turnstile_lets_all_through_in_order_over_several_turns() -> None:
    async def scenario() -> tuple[list[int], int]:
        turnstile = Turnstile(slice_s=0.0)  # nothing fits, but what a turn begins with
        done: list[int] = []
        for i in range(50):
            turnstile.enter(lambda i=i: done.append(i))
        first = len(done)
        while len(done) < 50:
            await asyncio.sleep(0)
        return done, first

    done, first = asyncio.run(scenario())
    assert done == list(range(50))
    assert first < 50


def test_an_open_turnstile_does_not_keep_anybody_waiting() -> None:
    async def scenario() -> list[bool]:
        turnstile = Turnstile(slice_s=60.0)
        entered = [turnstile.enter(lambda: None) for _ in range(3)]
        await turns()
        return [*entered, turnstile.enter(lambda: None)]

    assert asyncio.run(scenario()) == [True] * 4
