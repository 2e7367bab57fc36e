"""The open-loop client sends on time, loses nothing and leaves nothing behind."""

import asyncio

import pytest
from fake_target import FakeTarget

from neo_desktop.app.bench.load.client import OUT_OF_TIME, ClientRequest, TargetError, send_all

NUM_REQUESTS = 5


def requests(count: int = NUM_REQUESTS, gap_ms: float = 2.0, tokens: int = 3) -> list[ClientRequest]:
    return [ClientRequest(index * gap_ms, str(index), tokens) for index in range(count)]


def test_all_are_sent_on_time_even_if_none_is_answered_before_the_last_is_sent() -> None:
    async def run() -> None:
        target = FakeTarget(asyncio.Event())
        sending = asyncio.create_task(send_all(target, requests()))
        while len(target.began) < NUM_REQUESTS:  # a closed loop would wait for the first answer
            await asyncio.sleep(0.001)
        target.gate.set()
        records = await sending
        assert [record.arrival_ms for record in records] == [0.0, 2.0, 4.0, 6.0, 8.0]
        for record in records:
            assert record.is_finished
            assert record.sent_ms >= record.arrival_ms - 0.1
            assert len(record.chunks_ms) == record.output_tokens == 3
            assert record.prompt_tokens == 7
            times = [record.sent_ms, *record.chunks_ms, record.end_ms]
            assert times == sorted(times)
            assert record.ttft_ms >= 8.0 - record.arrival_ms - 0.1  # the gate opened after the last arrival

    asyncio.run(run())


def test_requests_out_of_time_are_ended_and_counted() -> None:
    async def run() -> None:
        target = FakeTarget(asyncio.Event())
        records = await send_all(target, requests(), drain_s=0.02)
        assert [record.error for record in records] == [OUT_OF_TIME] * NUM_REQUESTS
        assert not target.open
        assert all(record.end_ms >= record.arrival_ms for record in records)

    asyncio.run(run())


def test_cancelling_ends_every_request() -> None:
    async def run() -> None:
        target = FakeTarget(asyncio.Event(), gap_s=1e6)
        target.gate.set()
        late = [*requests(), ClientRequest(1e9, "never", 1)]
        sending = asyncio.create_task(send_all(target, late))
        while len(target.open) < NUM_REQUESTS:
            await asyncio.sleep(0.001)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        assert not target.open
        assert "never" not in target.began

    asyncio.run(run())


def test_errors_of_the_target_become_records_and_disturb_nobody() -> None:
    async def run() -> None:
        errors = {
            "1": TargetError("full: try later"),
            "3": TargetError("the engine burnt down"),
        }
        target = FakeTarget(asyncio.Event(), errors=errors)
        target.gate.set()
        records = await send_all(target, requests())
        assert [record.error for record in records] == [
            "",
            "full: try later",
            "",
            "the engine burnt down",
            "",
        ]

    asyncio.run(run())


def test_a_defect_is_not_taken_for_a_failed_request() -> None:
    async def run() -> None:
        target = FakeTarget(asyncio.Event(), errors={"0": ZeroDivisionError()})
        with pytest.raises(ZeroDivisionError):
            await send_all(target, requests())
        assert not target.open

    asyncio.run(run())


def test_progress_counts_every_request_that_ends() -> None:
    async def run() -> None:
        target = FakeTarget(asyncio.Event())
        target.gate.set()
        ended: list[int] = []
        await send_all(target, requests(), on_end=ended.append)
        await asyncio.sleep(0)
        assert ended == [1, 2, 3, 4, 5]

    asyncio.run(run())
