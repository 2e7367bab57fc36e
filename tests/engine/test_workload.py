"""Workloads contain the file's data; errors name the malformed line."""

import json
from itertools import pairwise
from math import inf
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neo_desktop.engine.simulation.workload import WorkloadRequest, synthetic, with_rate
from research.traces import WorkloadError, load_trace

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def written(folder: Path, text: str) -> Path:
    path = folder / "trace"
    path.write_text(text, encoding="utf-8")
    return path


def test_azure_requests_arrive_when_they_did_counted_from_the_first(tmp_path: Path) -> None:
    text = HEADER + "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
    first, second = load_trace(written(tmp_path, text))
    assert (first.prompt_tokens, first.output_tokens, first.arrival_ms) == (374, 44, 0)
    assert (second.prompt_tokens, second.output_tokens) == (396, 109)
    assert second.arrival_ms == pytest.approx(4314.579, abs=0.01)


def test_azure_columns_are_found_by_name_and_times_may_name_their_zone_or_be_out_of_order(
    tmp_path: Path,
) -> None:
    text = (
        "\ufeffGeneratedTokens, TIMESTAMP,ContextTokens,Region\r\n"
        "7,2024-05-10 00:00:01.5+00:00,100,x\r\n\r\n8,2024-05-10 00:00:00+00:00,200,y\r\n"
    )
    assert load_trace(written(tmp_path, text)) == [
        WorkloadRequest(0.0, 200, 8),
        WorkloadRequest(1500.0, 100, 7),
    ]


def test_requests_of_a_json_list_come_all_at_once_in_its_order(tmp_path: Path) -> None:
    text = '\n [{"prompt": 3, "max_tokens": 4},\n\t{"max_tokens": 1, "prompt": 9, "id": "x"} ] \n'
    assert load_trace(written(tmp_path, text)) == [WorkloadRequest(0.0, 3, 4), WorkloadRequest(0.0, 9, 1)]


@given(
    st.lists(st.tuples(st.integers(1, 10**6), st.integers(1, 10**6)), min_size=1, max_size=20), st.booleans()
)
def test_json_written_by_any_program_is_read(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[tuple[int, int]], indented: bool
) -> None:
    rows = [{"prompt": prompt, "max_tokens": output} for prompt, output in lengths]
    path = written(tmp_path_factory.mktemp("traces"), json.dumps(rows, indent=2 if indented else None))
    assert [(r.prompt_tokens, r.output_tokens) for r in load_trace(path)] == lengths


GOOD_ROW = "2023-11-16 18:15:46.68,374,44\n"
GOOD_ENTRY = '[\n{"prompt": 1, "max_tokens": 1},\n'


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        (HEADER + GOOD_ROW + "2023-11-16 18:15:47,12,-3\n", 3, "GeneratedTokens"),
        (HEADER + "2023-11-16 18:15:47,0,3\n", 2, "ContextTokens"),
        (HEADER + "2023-11-16 18:15:47,1.5,3\n", 2, "ContextTokens"),
        (HEADER + f"2023-11-16 18:15:47,{'9' * 5000},3\n", 2, "ContextTokens"),
        (HEADER + "yesterday,12,3\n", 2, "yesterday"),
        (HEADER + GOOD_ROW + "\n2023-11-16 18:15:47,12\n", 4, "2 fields"),
        (HEADER + GOOD_ROW + "2023-11-16 18:15:47+00:00,12,3\n", 3, "not a time"),
        (HEADER + '"2023-11-16 18:15:47,12,3\n' + GOOD_ROW, 2, "fields"),
        ("TIMESTAMP,ContextTokens\n", 1, "GeneratedTokens"),
        ("", 1, "TIMESTAMP"),
        ("hello", 1, "TIMESTAMP"),
        ('{"prompt": 1, "max_tokens": 1}', 1, "expected"),
        (GOOD_ENTRY + '{"prompt": 1}\n]', 3, "max_tokens"),
        (GOOD_ENTRY + '{"prompt": true, "max_tokens": 1}\n]', 3, "prompt"),
        (GOOD_ENTRY + '{"prompt": "1", "max_tokens": 1}\n]', 3, "prompt"),
        (GOOD_ENTRY + '{"prompt": 1.0, "max_tokens": 1}\n]', 3, "prompt"),
        (GOOD_ENTRY + '{"prompt": 0, "max_tokens": 1}\n]', 3, "prompt"),
        (GOOD_ENTRY + '{"prompt": 1' + "0" * 5000 + ', "max_tokens": 1}\n]', 3, "JSON"),
        (GOOD_ENTRY + "[1, 1]\n]", 3, "object"),
        (GOOD_ENTRY + '{"prompt": 1,\n"max_tokens" 1}\n]', 4, "JSON"),
        (GOOD_ENTRY + '{"prompt": 1, "max_tokens": 1}\n', 4, "expected"),
        (GOOD_ENTRY + '{"prompt": 1, "max_tokens": 1}\n{', 4, "expected"),
        (GOOD_ENTRY + '{"prompt": 1, "max_tokens": 1}]\n]', 4, "follows"),
        ("[" * 100_000, 1, "JSON"),
    ],
)
def test_a_malformed_file_is_refused_in_one_line_that_names_the_place(
    tmp_path: Path, text: str, line: int, reason: str
) -> None:
    path = written(tmp_path, text)
    with pytest.raises(WorkloadError) as caught:
        load_trace(path)
    message = str(caught.value)
    assert message.startswith(f"{path}, line {line}: ")
    assert reason in message
    assert "\n" not in message


@pytest.mark.parametrize("text", ["[]", HEADER])
def test_a_file_without_requests_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(WorkloadError, match="holds no requests"):
        load_trace(written(tmp_path, text))


def test_a_binary_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(WorkloadError, match="not a text file"):
        load_trace(path)


@given(st.integers(1, 50), st.integers(1, 3000), st.integers(1, 3000), st.integers())
def test_synthetic_lengths_stay_within_a_tenth_and_repeat_with_the_seed(
    count: int, prompt: int, output: int, seed: int
) -> None:
    requests = synthetic(count, prompt, output, seed)
    assert len(requests) == count
    for request in requests:
        assert 0.9 * prompt <= request.prompt_tokens <= 1.1 * prompt
        assert 0.9 * output <= request.output_tokens <= 1.1 * output
    assert requests == synthetic(count, prompt, output, seed)


def test_synthetic_lengths_are_spread_evenly() -> None:
    prompts = [request.prompt_tokens for request in synthetic(2000, 1000, 100)]
    assert min(prompts) < 905
    assert max(prompts) > 1095
    assert sum(prompts) / len(prompts) == pytest.approx(1000, rel=0.01)


def test_poisson_arrivals_have_the_rate_and_change_nothing_else() -> None:
    requests = synthetic(4000, 100, 10)
    arriving = with_rate(requests, 2.0, seed=1)
    gaps = [b.arrival_ms - a.arrival_ms for a, b in pairwise(arriving)]
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert mean == pytest.approx(500, rel=0.05)
    assert variance**0.5 == pytest.approx(mean, rel=0.1)  # exponential: its deviation equals its mean
    assert arriving[0].arrival_ms == 0
    assert with_rate(arriving, inf) == requests
    assert with_rate(requests, 2.0, seed=1) == arriving
    assert with_rate(requests, 2.0, seed=2) != arriving


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan")])
def test_a_rate_must_be_positive(rate: float) -> None:
    with pytest.raises(ValueError, match="above 0"):
        with_rate(synthetic(1, 1, 1), rate)
