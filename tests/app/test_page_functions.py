"""The page's named functions, for programs."""

import inspect
from dataclasses import replace
from pathlib import Path

from gradio_client import Client
from hypothesis import example, given
from hypothesis import strategies as st

from neo_desktop.app.chats.chats import check_settings
from neo_desktop.app.chats.messages import Settings
from neo_desktop.engine.errors import SettingError
from neo_desktop.ui.page import build, mount
from neo_desktop.ui.settings import NUMBERS, applied

from .chat_client import ChatClient
from .conftest import running
from .fake_engine import ScriptedExecutor, make_engine


def test_programs_chat_by_the_pages_functions(tmp_path: Path) -> None:
    executor = ScriptedExecutor()
    executor.answers = ["<think>hm</think>the answer"]
    with running(make_engine(executor), data_folder=tmp_path, mount=mount) as server:
        client = Client(server.url, verbose=False)
        assert set(client.view_api(return_format="dict", print_info=False)["named_endpoints"]) == {
            "/chat",
            "/models",
        }
        said = client.predict("a question", "", api_name="/chat")
        assert (said["thought"], said["text"], said["state"]) == ("hm", "the answer", "done")
        more = [*client.submit("another one", said["chat_id"], api_name="/chat")][-1]
        assert (more["chat_id"], more["state"]) == (said["chat_id"], "done")
        assert ChatClient(server.url).titles() == ["a question"]
        assert [model["runnable"] for model in client.predict(api_name="/models")] == []


def test_all_functions_of_the_page_run_on_the_event_loop(tmp_path: Path) -> None:
    """The functions call objects that belong to the event loop."""
    with running(make_engine(ScriptedExecutor()), data_folder=tmp_path) as server:
        functions = [one.fn for one in build(server.app.state.page).fns.values() if one.fn is not None]
    assert len(functions) > 20
    for function in functions:
        assert inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function), function


SHOWN = st.tuples(
    *(st.none() | (st.integers() if is_whole else st.floats(-3, 3)) for *_, is_whole in NUMBERS)
)


@given(SHOWN, SHOWN)
@example((0.5, *(None,) * 6), (1000.0, 0.9, 7, *(None,) * 4))
def test_a_refused_setting_keeps_no_other_from_being_applied(
    before: tuple[object, ...], shown: tuple[object, ...]
) -> None:
    settings, _ = applied(Settings(), ["be brief", *before])
    new, refusals = applied(settings, ["", *shown])
    check_settings(new)
    assert new.system_prompt is None
    refused = []
    for (name, *_), value in zip(NUMBERS, shown, strict=True):
        try:
            check_settings(replace(Settings(), **{name: value}))
        except SettingError:
            refused.append(name)
        assert getattr(new, name) == (getattr(settings, name) if name in refused else value)
    assert len(refusals) == len(refused)
    assert all(sentence.startswith(name) for sentence, name in zip(refusals, refused, strict=True))
