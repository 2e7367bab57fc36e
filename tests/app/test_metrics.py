"""The metrics for Prometheus."""

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from neo_desktop.app.shelf.hosting import ModelHost

from .conftest import RunningServer, eventually, is_idle
from .fake_engine import FakeExecutor


def figures(server: RunningServer, **headers: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    answer = httpx.get(f"{server.url}/metrics", headers=headers, trust_env=False, timeout=30)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain")
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def test_requests_are_counted_and_timed(server: RunningServer) -> None:
    body = {"prompt": ["xx", "yyy"], "n": 2, "max_tokens": 5}
    assert httpx.post(f"{server.url}/v1/completions", json=body, trust_env=False, timeout=30).is_success
    eventually(lambda: is_idle(server.service))
    found = figures(server)

    def figure(name: str, **labels: str) -> float:
        return found[f"neo_desktop_{name}", frozenset(labels.items())]

    assert figure("output_tokens_total") == 20
    assert figure("prompt_tokens_total") == 10  # each output's prompt, computed or reused
    assert figure("outputs_total", finish_reason="length") == 4
    assert figure("time_to_first_token_seconds_count") == 4
    assert figure("time_per_output_token_seconds_count") == 4
    assert figure("iteration_seconds_count") >= 5
    assert figure("running_requests", tier="gpu") == 0
    assert figure("waiting_requests") == figure("queued_outputs") == 0
    assert figure("cache_size_tokens", tier="gpu") == 64 * 16
    assert (
        figure(
            "model_info", model="alphabet", backend="neo", policy="gpu-only", device="cpu", dtype="float32"
        )
        == 1
    )


def test_running_requests_are_told_by_place(server: RunningServer, executor: FakeExecutor) -> None:
    body = {"prompt": "xx", "max_tokens": 400, "stream": True}
    executor.open.clear()
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, trust_env=False, timeout=30):
        key = "neo_desktop_running_requests", frozenset({("tier", "gpu")})
        executor.steps.release()
        eventually(lambda: figures(server)[key] == 1)
        executor.open.set()
    eventually(lambda: figures(server)[key] == 0)


def test_without_a_model_there_are_the_servers_own(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.app.state.host._service, service = None, server.app.state.host._service
    assert isinstance(server.app.state.host, ModelHost)
    names = {name for name, _ in figures(server)}
    server.app.state.host._service = service
    assert "process_resident_memory_bytes" in names
    assert "neo_desktop_running_requests" not in names
