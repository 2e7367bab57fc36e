"""The page's named functions, for programs."""

import inspect
from pathlib import Path

from gradio_client import Client

from neo_desktop.ui.page import build, mount

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
