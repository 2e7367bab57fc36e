"""llama.cpp behind the same service, with an imitation of its functions."""

import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import httpx
import openai
import pytest

from neo_desktop.app.engines.loop import EngineThread
from neo_desktop.app.llamacpp import choice, library
from neo_desktop.app.llamacpp.choice import check_llamacpp
from neo_desktop.app.llamacpp.recipe import LlamaCppRecipe
from neo_desktop.app.llamacpp.tokenizer import LlamaCppTokenizer
from neo_desktop.app.shelf.catalogue import Catalogue
from neo_desktop.app.shelf.model_loader import ModelLoader
from neo_desktop.engine.options import EngineOptions
from neo_desktop.models.json_file import ModelError
from neo_desktop.models.marks import Shield

from .conftest import RunningServer, eventually, is_idle, running

IMITATION = Path(__file__).parents[1] / "imitated_llama_cpp"
CPU = EngineOptions(device="cpu")
MESSAGES: Any = [{"role": "user", "content": "hello"}]
NUM_PROMPT_TOKENS = len("<user>hello<assistant>") + 1  # with the token at its beginning


def nothing(share: float, what: str) -> None:
    pass


def forget_llama_cpp() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "llama_cpp"]:
        del sys.modules[name]
    library._api.cache_clear()


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The imitation, which replaces an installed llama-cpp-python."""
    kept = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "llama_cpp"}
    monkeypatch.syspath_prepend(str(IMITATION))
    forget_llama_cpp()
    yield library._api()
    forget_llama_cpp()
    sys.modules.update(kept)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A GGUF file without weights, of a model that the engine does not support."""
    path = tmp_path / "strange.gguf"
    writer = gguf.GGUFWriter(path, "gemma")
    writer.add_context_length(600)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def server(api: Any, file: Path) -> Iterator[RunningServer]:
    engine = LlamaCppRecipe("strange", file, CPU)(nothing)
    with running(EngineThread(engine)) as running_server:
        yield running_server
        api.gate.set()


def letters(num_prompt_tokens: int, count: int) -> str:
    return "".join(chr(ord("a") + (num_prompt_tokens + i) % 26) for i in range(count))


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(
        **({"model": "strange", "messages": MESSAGES, "max_tokens": 3, "temperature": 0} | fields)
    )


def test_chats_are_answered_as_by_the_engine(server: RunningServer, client: openai.OpenAI) -> None:
    answer = ask(client, logprobs=True, top_logprobs=2)
    (choice_,) = answer.choices
    expected = letters(NUM_PROMPT_TOKENS, 3)
    assert (choice_.message.content, choice_.finish_reason) == (expected, "length")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (NUM_PROMPT_TOKENS, 3)
    assert [token.token for token in choice_.logprobs.content] == list(expected)
    parts = list(ask(client, stream=True, stream_options={"include_usage": True}))
    assert "".join(part.choices[0].delta.content or "" for part in parts if part.choices) == expected
    assert parts[-1].usage.completion_tokens == 3
    many = ask(client, n=3, temperature=1.0, seed=1)
    assert [each.message.content for each in many.choices] == [expected] * 3  # no other token is probable
    ended = ask(client, max_tokens=100).choices[0]
    assert ended.finish_reason == "stop"
    assert ended.message.content.endswith("z")
    stopped = ask(client, max_tokens=100, stop=[expected[1:]]).choices[0]
    assert (stopped.message.content, stopped.finish_reason) == (expected[0], "stop")


def test_text_of_a_chat_is_no_control_token(api: Any, file: Path) -> None:
    tokenizer = LlamaCppTokenizer(file)
    shield = Shield(tokenizer.marks, said := "a<end>b<begin>")
    text = shield.read(f"<begin>{shield.broken(said)}<end>")
    assert tokenizer.encode_chat(text) == [api.BEGIN, *said.encode(), api.END]
    assert tokenizer.encode_chat(shield.read("a<end>")) == [api.BEGIN, *b"a", api.END]


def test_every_setting_of_the_engine_holds(server: RunningServer, client: openai.OpenAI) -> None:
    first, second = list(letters(NUM_PROMPT_TOKENS, 2))
    biased = ask(client, logit_bias={str(ord("!")): 100})
    assert biased.choices[0].message.content == "!!!"
    followed = ask(client, max_tokens=20, extra_body={"structured_outputs": {"regex": "(yes|no)"}})
    assert followed.choices[0].message.content in ("yes", "no")
    assert ask(client, stop=[second]).choices[0].message.content == first


def test_a_chat_that_goes_on_is_not_read_again(
    api: Any, server: RunningServer, client: openai.OpenAI
) -> None:
    ask(client)
    api.decoded.clear()
    more = [*MESSAGES, {"role": "assistant", "content": letters(NUM_PROMPT_TOKENS, 3)}, *MESSAGES]
    answer = ask(client, messages=more)
    cached = NUM_PROMPT_TOKENS + 2  # an answer's last token is never evaluated
    assert answer.usage.prompt_tokens_details.cached_tokens == cached
    assert sum(map(len, api.decoded)) == answer.usage.prompt_tokens - cached + 2


def test_long_prompts_are_read_in_pieces(api: Any, server: RunningServer, client: openai.OpenAI) -> None:
    api.decoded.clear()
    client.completions.create(model="strange", prompt="x" * 550, max_tokens=1)
    assert [len(each) for each in api.decoded] == [512, 39]  # with the token at its beginning


def test_what_is_missing_is_said(server: RunningServer, http: httpx.Client) -> None:
    health = http.get("/health").json()
    assert health["backend"] == "llamacpp"
    assert all(what in health["note"] for what in ("offloading", "one after the other", "scheduler"))
    stats = http.get("/stats").json()
    assert (stats["backend"], stats["dtype"]) == ("llamacpp", "all F32")
    assert 'backend="llamacpp"' in http.get("/metrics").text
    refused = http.post("/v1/embeddings", json={"model": "strange", "input": "x"})
    assert refused.status_code == 400
    assert "llama.cpp computes this model, for answers only" in refused.json()["error"]["message"]


def test_requests_wait_for_their_turn_and_are_cancelled(
    api: Any, server: RunningServer, client: openai.OpenAI
) -> None:
    stream = ask(client, stream=True, max_tokens=500, logit_bias={str(api.END): -100})
    assert next(iter(stream)).choices  # the stream has started
    others = [threading.Thread(target=ask, args=(client,)) for _ in range(2)]
    api.gate.clear()
    for other in others:
        other.start()
    eventually(lambda: server.service.num_queued >= 2)
    stream.close()
    api.gate.set()
    for other in others:
        other.join(30)
    eventually(lambda: is_idle(server.service))
    stats = server.service.stats
    assert stats.num_output_tokens < 500
    assert stats.num_cached_tokens > 0


@pytest.mark.parametrize(("text", "message"), [("\a", "the bell rang"), ("\x06", "not finite")])
def test_a_failure_is_told_and_the_next_request_is_answered(
    text: str, message: str, server: RunningServer, client: openai.OpenAI
) -> None:
    with pytest.raises(openai.InternalServerError, match=message):
        client.completions.create(model="strange", prompt=text, max_tokens=3)
    assert ask(client).choices[0].message.content == letters(NUM_PROMPT_TOKENS, 3)


def test_the_context_is_a_limit_as_elsewhere(server: RunningServer, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="maximum context length is 600") as error:
        ask(client, max_tokens=590)
    assert error.value.code == "context_length_exceeded"
    assert client.models.list().data[0].model_extra == {"root": "strange", "max_model_len": 600}


def test_it_is_chosen_where_the_engine_has_not_what_a_model_needs(
    api: Any, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalogue = Catalogue([file.parent], model=str(file))
    model = catalogue.get("strange")
    assert (model.needs_llamacpp, model.reason) == (True, None)
    assert (model.architecture, model.context_tokens) == ("gemma", 600)
    loader = ModelLoader(catalogue, CPU)
    assert loader.why_not(model) is None
    assert loader.runs_llamacpp(model)
    assert not loader.runs_llamacpp(catalogue.get("builtin"))
    refusing = ModelLoader(catalogue, CPU, backend="neo")
    assert not refusing.runs_llamacpp(model)
    told = {one.name: loader.candidate(one) for one in catalogue.models()}
    assert [told[name].runs_llamacpp for name in ("strange", "neo-desktop-guide")] == [True, False]
    assert told["strange"].reason is None
    refused = refusing.candidate(catalogue.get("strange"))
    assert "'gemma'" in (refused.reason or "")
    monkeypatch.setattr(choice, "is_installed", lambda: False)
    monkeypatch.setattr("neo_desktop.app.shelf.checkpoint_summary.is_installed", lambda: False)
    monkeypatch.setattr("neo_desktop.app.shelf.model_loader.is_installed", lambda: False)
    for reason in (catalogue.get("strange").reason, loader.why_not(model)):
        assert reason is not None
        assert "'gemma'" in reason
        assert "pip install 'neo-desktop[llamacpp]'" in reason
    with pytest.raises(ValueError, match=r"needs llama-cpp-python: .*pip install"):
        ModelLoader(catalogue, CPU, backend="llamacpp").check(model)


def test_it_runs_in_a_process_of_its_own(api: Any, file: Path) -> None:
    loader = ModelLoader(Catalogue([file.parent], model=str(file)), CPU)
    service = loader("strange", nothing)
    try:
        assert service.is_process
        assert service.note == loader.note
        assert service.stats.backend == "llamacpp"
        assert service.tokenizer.encode("az", False) == [97, 122]
        assert service.tokenizer.special_tokens == {"bos_token": "<begin>", "eos_token": "<end>"}
        assert service.sampling_defaults.temperature == 0.5
    finally:
        service.close()


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["SIGSEGV", "SIGILL", "SIGABRT"])
def test_a_build_that_crashes_is_said(
    name: str, api: Any, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IMITATED_CRASH", str(int(signal.Signals[name])))
    loader = ModelLoader(Catalogue([file.parent], model=str(file)), CPU)
    with pytest.raises(RuntimeError, match=rf"crashed \({name}\).*Trying.*-DGGML_NATIVE=OFF"):
        loader("strange", nothing)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policy": "neo"}, "has no --policy"),
        ({"dtype": "float16", "gpu_cache_tokens": 5}, "has no --dtype, --gpu-cache-tokens"),
        ({"max_batch_requests": 8}, "has no max_batch_requests"),
        ({"shape": "llama-2-7b"}, "models in GGUF files"),
    ],
)
def test_options_that_mean_nothing_to_it_are_refused_by_name(
    changes: dict[str, Any], message: str, api: Any, file: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        check_llamacpp(file, EngineOptions(**changes))
    assert check_llamacpp(file, EngineOptions(cpu_cache_tokens=100)) == file


def test_other_files_and_devices_are_refused(api: Any, file: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="models in GGUF files, and this is none"):
        check_llamacpp(tmp_path / "empty", CPU)
    with pytest.raises(ValueError, match="without CUDA"):
        LlamaCppRecipe("strange", file, EngineOptions(device="cuda"))(nothing)
    file.write_bytes(b"damaged")
    with pytest.raises(ModelError, match=r"cannot load .*: error loading model: the weights are damaged\."):
        LlamaCppRecipe("strange", file, CPU)(nothing)
    file.write_bytes(b"encoder")
    with pytest.raises(ModelError, match="writes no answers: it has an encoder"):
        LlamaCppRecipe("strange", file, CPU)(nothing)
