"""Images from clients and from the page to a model that reads them."""

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from vision_models import bomb, greedy, picture, save

from neo_desktop import Engine
from neo_desktop.app.generate import images

from .chat_client import ChatClient, RefusedError
from .conftest import RunningServer, running
from .fake_engine import MODEL, FakeExecutor, make_engine

GREEDY: Any = {"temperature": 0.0, "max_tokens": 6}
FILES = [picture(50, 40, 1), picture(30, 90, 2, "JPEG")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("vision") / "m", "mistral3")


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    data = tmp_path_factory.mktemp("data")
    with (
        Engine.from_pretrained(folder, device="cpu", gpu_cache_tokens=1024) as engine,
        running(engine, data_folder=data) as running_server,
    ):
        yield running_server


@pytest.fixture
def chats(server: RunningServer) -> ChatClient:
    return ChatClient(server.url)


def data_url(file: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(file).decode()}"


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


def openai_image(file: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(file), "detail": "low"}}


def anthropic_image(file: bytes) -> dict[str, Any]:
    data = base64.b64encode(file).decode()
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}


def ask(client: openai.OpenAI, *content: dict[str, Any], model: str = "m") -> Any:
    messages: Any = [{"role": "user", "content": list(content)}]
    return client.chat.completions.create(
        model=model, messages=messages, extra_body={"return_token_ids": True}, **GREEDY
    )


def test_openai_clients_get_the_tokens_of_transformers(server: RunningServer, folder: Path) -> None:
    answer = ask(server.client(), text("one"), openai_image(FILES[0]), text("two"), openai_image(FILES[1]))
    prompt, tokens = answer.prompt_token_ids, answer.choices[0].token_ids
    assert tokens == greedy(folder, tuple(prompt), FILES, 6)
    written = server.service.tokenizer.decode(prompt, skip_special_tokens=False)
    assert written.startswith("<|user|>one[IMG][IMG]")
    assert "two[IMG]" in written
    assert answer.usage.prompt_tokens == len(prompt)


def test_marks_of_images_in_texts_stay_text(server: RunningServer) -> None:
    answer = ask(server.client(), text("[IMG] and"), openai_image(FILES[0]))
    token_id = server.service.tokenizer.encode("[IMG]", add_special_tokens=False)
    assert answer.prompt_token_ids.count(*token_id) == 12  # 50 x 40 pixels


def test_the_next_turn_reads_the_image_from_the_cache(server: RunningServer) -> None:
    client: Any = server.client()
    question = {"role": "user", "content": [openai_image(picture(50, 50, 7)), text("What is this?")]}
    turns = [question, {"role": "assistant", "content": "A picture"}, {"role": "user", "content": "Really?"}]
    first, second = (
        client.chat.completions.create(model="m", messages=messages, **GREEDY).usage
        for messages in (turns[:1], turns)
    )
    assert first.prompt_tokens_details.cached_tokens == 0
    assert second.prompt_tokens_details.cached_tokens >= 16


def test_anthropic_clients_and_responses_read_the_same_prompt(server: RunningServer) -> None:
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    content: Any = [text("See"), anthropic_image(FILES[0])]
    messages: Any = [{"role": "user", "content": content}]
    answer: Any = client.messages.create(
        model="m", messages=messages, max_tokens=6, extra_body={"temperature": 0.0}
    )
    same = ask(server.client(), text("See"), openai_image(FILES[0]))
    assert answer.content[0].text == same.choices[0].message.content
    counted = client.messages.count_tokens(model="m", messages=messages)
    assert counted.input_tokens == same.usage.prompt_tokens
    parts: Any = [
        {"type": "input_text", "text": "See"},
        {"type": "input_image", "image_url": data_url(FILES[0])},
    ]
    response = server.client().responses.create(
        model="m", input=[{"role": "user", "content": parts}], temperature=0.0, max_output_tokens=6
    )
    assert response.output_text == same.choices[0].message.content


def test_results_of_tools_show_images(server: RunningServer, folder: Path) -> None:
    """The same prompt by all protocols, and the tokens of transformers."""
    function = {"name": "look", "arguments": "{}"}
    call = {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": function}]}
    result = {"role": "tool", "tool_call_id": "1", "content": [text("Here:"), openai_image(FILES[0])]}
    messages: Any = [{"role": "user", "content": "Look!"}, call, result]
    client: Any = server.client()
    answer = client.chat.completions.create(
        model="m", messages=messages, extra_body={"return_token_ids": True}, **GREEDY
    )
    prompt = answer.prompt_token_ids
    assert answer.choices[0].token_ids == greedy(folder, tuple(prompt), FILES[:1], 6)

    blocks = [text("Here:"), anthropic_image(FILES[0])]
    turns: Any = [
        messages[0],
        {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "look", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": blocks}]},
    ]
    other = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    same: Any = other.messages.create(
        model="m", messages=turns, max_tokens=6, extra_body={"temperature": 0.0}
    )
    assert same.usage.input_tokens + same.usage.cache_read_input_tokens == len(prompt)
    assert same.content[0].text == answer.choices[0].message.content

    image = {"type": "input_image", "image_url": data_url(FILES[0])}
    parts = [{"type": "input_text", "text": "Here:"}, image]
    items: Any = [
        messages[0],
        {"type": "function_call", "call_id": "1"} | function,
        {"type": "function_call_output", "call_id": "1", "output": parts},
    ]
    response = client.responses.create(model="m", input=items, temperature=0.0, max_output_tokens=6)
    assert response.output_text == answer.choices[0].message.content


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        ({"url": "https://example.org/cat.png"}, "this server fetches nothing"),
        ({"url": "file:///etc/passwd"}, "this server fetches nothing"),
        ({"url": "data:image/png,abc"}, "must be a data URL"),
        ({"url": "data:image/png;base64,%%%"}, "is not valid base64"),
        ({"url": "data:image/svg+xml;base64,PHN2Zy8+"}, "is not a readable PNG, JPEG, WEBP or GIF file"),
        ({"url": data_url(FILES[0][:-200])}, "the image is damaged"),
        ({"url": data_url(bomb())}, "64,000,000 is the limit"),
        ({}, "url"),
    ],
)
def test_bad_images_are_refused(server: RunningServer, part: dict[str, Any], reason: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        ask(server.client(), {"type": "image_url", "image_url": part})
    assert reason in str(refused.value)


def test_images_elsewhere_and_too_many_are_refused(server: RunningServer) -> None:
    client: Any = server.client()
    for role in ("system", "assistant"):
        with pytest.raises(openai.BadRequestError, match="only a user's message and a tool's result"):
            client.chat.completions.create(
                model="m", messages=[{"role": role, "content": [openai_image(FILES[0])]}]
            )
    with pytest.raises(openai.BadRequestError, match="cannot be continued: it has images"):
        client.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": [openai_image(FILES[0])]}],
            extra_body={"continue_final_message": True},
        )
    with pytest.raises(openai.BadRequestError, match="21 images, but 20 is the limit"):
        ask(client, *[openai_image(FILES[0])] * (images.MAX_IMAGES + 1))
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        ask(client, text("x" * 600), openai_image(FILES[0]))


def test_a_model_without_eyes_says_so(executor: FakeExecutor, tmp_path: Path) -> None:
    with running(make_engine(executor), data_folder=tmp_path) as blind:
        with pytest.raises(openai.BadRequestError, match="this model reads text only"):
            ask(blind.client(), openai_image(FILES[0]), model=MODEL)
        client: Any = blind.client()
        result = {"role": "tool", "tool_call_id": "1", "content": [openai_image(FILES[0])]}
        with pytest.raises(openai.BadRequestError, match="this model reads text only"):
            client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "?"}, result])
        with pytest.raises(RefusedError, match=r"cat\.png is an image, but this model reads text only"):
            ChatClient(blind.url).call("attach", "cat.png", FILES[0].decode("latin-1"))


def test_images_of_the_page_stay_with_their_chat(server: RunningServer, chats: ChatClient) -> None:
    file = chats.call("attach", "cat.png", FILES[0].decode("latin-1"))
    assert (file["kind"], base64.b64decode(file["text"])) == ("image", FILES[0])
    chat_id = chats.new_chat(max_tokens=6, temperature=0.0)
    answer = chats.answered(chat_id, "What is this?", attachment_ids=[file["id"]])
    same = ask(server.client(), openai_image(FILES[0]), text("What is this?"))
    assert answer["text"] == same.choices[0].message.content
    follow_up = chats.answered(chat_id, "And now?", answer["id"])
    assert follow_up["figures"]["prompt_tokens"] > answer["figures"]["prompt_tokens"]
    exported = chats.call("export", chat_id)
    (imported,) = chats.call("add", exported.encode().decode("latin-1"))
    assert chats.call("export", imported) == exported
