"""Many simultaneous calls leave the event loop time for other work."""

import asyncio

from neo_desktop.app.engines.service import CALLS_PER_TURN, Outbox


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
