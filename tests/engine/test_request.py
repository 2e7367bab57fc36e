"""End of a request, and release of its text."""

import pytest
from engine_fakes import make_request
from hypothesis import given
from hypothesis import strategies as st

from neo_desktop.engine.batch import SampledToken
from neo_desktop.engine.detokenizer import IncrementalText
from neo_desktop.engine.request import FinishReason, Request
from neo_desktop.engine.sampling_params import SamplingParams
from neo_desktop.models.thoughts import Thoughts, ThoughtSplitter


class PieceStream:
    """A stream whose token `i` is the i-th of the given pieces of text."""

    def __init__(self, pieces: list[str]) -> None:
        self.pieces = pieces

    def step(self, token_id: int) -> str:
        return self.pieces[token_id]

    def flush(self) -> str:
        return ""


letters = st.text(alphabet="ab", max_size=4)


@given(pieces=st.lists(letters, max_size=12), stop=st.lists(letters.filter(bool), max_size=3))
def test_text_ends_before_the_first_stop_string_and_no_part_of_one_is_ever_shown(
    pieces: list[str], stop: list[str]
) -> None:
    text = IncrementalText(PieceStream(pieces), stop)
    shown = ""
    seen = ""
    for token_id, piece in enumerate(pieces):
        seen += piece
        stopped = text.push(token_id)
        shown += text.take()
        assert seen.startswith(shown)
        assert stopped == any(s in seen for s in stop)
        if stopped:
            break
    text.finish()
    shown += text.take()
    # This last token may complete several stop strings: the text ends before the first one.
    ends = [seen.find(s) for s in stop if s in seen]
    assert shown == seen[: min(ends, default=len(seen))]


@given(
    pieces=st.lists(st.sampled_from(["<think>", "</think>", "<th", "ink>", "</", "a", "b", " "]), max_size=9),
    stop=st.lists(st.sampled_from(["a", "b", "ab", "ink", ">", " ", "a "]), max_size=3),
    thoughts=st.sampled_from(["possible", "open"]),
)
def test_stop_strings_count_from_the_end_of_the_thought_on(
    pieces: list[str], stop: list[str], thoughts: Thoughts
) -> None:
    text = IncrementalText(PieceStream(pieces), stop, thoughts)
    shown = ""
    for token_id in range(len(pieces)):
        is_stopped = text.push(token_id)
        shown += text.take()
        if is_stopped:
            break
    text.finish()
    shown += text.take()
    whole, splitter = "".join(pieces), ThoughtSplitter(thoughts == "open")
    parts = [*splitter.split(whole), *splitter.flush()]
    answer = "".join(part for kind, part in parts if kind == "answer")
    ends = {found: answer.find(found) for found in stop if found in answer}
    first = min(ends.values(), default=len(answer))
    assert shown == whole[: len(whole) - len(answer) + first]
    assert text.stopped_by in ([found for found, end in ends.items() if end == first] or [None])


def run(request: Request, tokens: list[int]) -> str:
    """Feed tokens until the request ends; return the text."""
    text = ""
    for token_id in tokens:
        request.append(SampledToken(token_id))
        text += request.take_output().text
        if request.is_finished:
            break
    return text


def test_the_models_end_token_ends_the_request_and_is_not_text() -> None:
    request = make_request("r", [0], SamplingParams(), eos_token_ids=(3,))
    assert run(request, [0, 1, 3, 2]) == "ab"
    assert request.finish_reason is FinishReason.STOP
    assert request.token_ids == [0, 0, 1, 3]


def test_ignore_eos_goes_on_but_stop_token_ids_still_end() -> None:
    params = SamplingParams(ignore_eos=True, stop_token_ids=[4])
    request = make_request("r", [0], params, eos_token_ids=(3,))
    assert run(request, [3, 3, 4, 1]) == "dd"
    assert request.finish_reason is FinishReason.STOP


def test_max_tokens_and_the_context_bound_the_output() -> None:
    request = make_request("r", [0, 0], SamplingParams(max_tokens=3))
    assert run(request, [0, 1, 2, 3]) == "abc"
    assert request.finish_reason is FinishReason.LENGTH
    request = make_request("r", [0, 0], SamplingParams(), max_context_tokens=4)
    assert run(request, [0, 1, 2, 3]) == "ab"
    assert request.finish_reason is FinishReason.LENGTH


def test_text_held_back_for_a_stop_string_that_never_comes_is_released_at_the_end() -> None:
    request = make_request("r", [0], SamplingParams(max_tokens=2, stop=["abc"]))
    assert run(request, [0, 1]) == "ab"


def test_an_abort_releases_the_text_too() -> None:
    request = make_request("r", [0], SamplingParams(stop=["abc"]))
    request.append(SampledToken(0))
    assert request.take_output().text == ""
    request.finish(FinishReason.ABORT)
    assert request.take_output().text == "a"


def test_penalties_see_each_prompt_token_once_and_the_output_so_far() -> None:
    request = make_request("r", [5, 3, 5, 3, 3], SamplingParams(presence_penalty=1.0))
    before = request.sampling_input()
    for token_id in (7, 7, 3):
        request.num_tokens += 1  # the scheduler counts it at the start of its iteration
        request.append(SampledToken(token_id))
    now = request.sampling_input()
    assert now.prompt_token_ids.tolist() == [3, 5]
    assert now.output_token_ids.tolist() == [7, 7, 3]
    assert now.position == 8
    assert before.output_token_ids.tolist() == [], "an iteration's input must not change after it was made"


def test_without_penalties_the_sampler_is_given_no_tokens() -> None:
    request = make_request("r", [5, 3], SamplingParams(temperature=0.7))
    request.append(SampledToken(7))
    assert (
        len(request.sampling_input().prompt_token_ids) == len(request.sampling_input().output_token_ids) == 0
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", "hot"),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", 2.0),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 3.0),
        ("frequency_penalty", -3.0),
        ("seed", 2**64),
        ("stop", [""]),
        ("stop", ["x"] * 99),
        ("stop_token_ids", [-1]),
        ("logprobs", 21),
        ("n", 0),
    ],
)
def test_a_setting_out_of_range_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        SamplingParams(**{field: value})  # type: ignore[arg-type]
