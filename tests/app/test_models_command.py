"""`neo-desktop models`: listing, describing, removing."""

import json
import re
import shutil
from pathlib import Path

import pytest
from checkpoints import save_checkpoint
from gguf_files import write_gguf
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from neo_desktop import Engine
from neo_desktop.app.cli import app
from neo_desktop.app.shelf import pull as pulling
from neo_desktop.app.shelf.catalogue import Catalogue, UnknownModelError, with_model
from neo_desktop.app.shelf.hub_files import PullError
from neo_desktop.app.shelf.model_loader import ModelLoader
from neo_desktop.app.shelf.pull import check_name
from neo_desktop.app.shelf.recommended import RECOMMENDED
from neo_desktop.engine.options import GIB, EngineOptions
from neo_desktop.engine.profiling.budget import FreeMemory
from neo_desktop.models.json_file import ModelError


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("hub") / "tiny", "llama")


@pytest.fixture(autouse=True)
def data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("NEO_DESKTOP_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("NEO_DESKTOP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "data"


def run(*arguments: str, answer: str | None = None, columns: int = 200) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["models", *arguments], input=answer, env={"COLUMNS": str(columns)})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        return 1, str(result.exception)
    return result.exit_code, result.output


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("nosuch", "no model named 'nosuch' is on this computer.*here are:.*models pull smollm2"),
        ("Qwen/Qwen3-4B", "no model named 'Qwen/Qwen3-4B'.*models pull Qwen/Qwen3-4B'"),
        ("neo-desktop-guid", "no model named 'neo-desktop-guid'"),
        ("", "the model's name is empty"),
        ("./nosuch", "there is no file or folder nosuch"),
        ("{top}/tini", "there is no file or folder .*/tini: did you mean .*/tiny[?]"),
        ("{top}/nofolder/a.gguf", "there is no file or folder .*/nofolder: check"),
        ("{top}/empty", "/empty has no model: name a folder with config.json"),
        ("{top}", "is not a model, but a folder of models: name one of them, such as .*--models-dir"),
        ("{top}/note.txt", "note.txt is not a GGUF file: name a GGUF file"),
        ("{top}/other/text.gguf", "text.gguf is not a GGUF file.*download it again"),
        ("{top}/tiny/model.safetensors", "is one file of a model: name its folder, .*/tiny"),
    ],
)
def test_a_name_of_no_model_is_answered_with_the_same_sentence_everywhere(
    checkpoint: Path, name: str, sentence: str
) -> None:
    top = checkpoint.parent
    (top / "empty").mkdir(exist_ok=True)
    (top / "note.txt").write_text("a note")
    (top / "other").mkdir(exist_ok=True)
    (top / "other" / "text.gguf").write_text("no model")
    asked = name.format(top=top)
    with pytest.raises(ModelError, match=sentence):
        Engine.from_pretrained(asked)
    if Path(asked).exists() and asked:
        catalogue = Catalogue([], model=asked)
        with pytest.raises(ModelError, match=sentence):  # serve and chat
            ModelLoader(catalogue, EngineOptions()).check(catalogue.get(catalogue.first))
        assert re.search(sentence.replace(".*/", ".*"), " ".join(run("info", asked)[1].split()))
        return
    with pytest.raises(UnknownModelError, match=sentence):
        Catalogue([], model=asked)
    with pytest.raises(UnknownModelError, match=sentence):  # bench, doctor
        with_model(EngineOptions(), asked)
    for command in ("info", "remove"):
        assert re.search(sentence, run(command, asked)[1])


def test_list_and_info_tell_what_fits(tmp_path: Path) -> None:
    code, shown = run("list", "--json", str(tmp_path / "models.json"))
    assert (code, "neo-desktop-guide" in shown) == (0, True)
    (model,) = json.loads((tmp_path / "models.json").read_text())
    assert model["fit"]["chats"] >= model["fit"]["gpu_chats"] > 0
    assert model["fit"]["speed"]["one_chat_tokens_per_s"] > 0
    assert (
        "self-test" in model["fit"]["speed"]["assumption"]
        or "quick look" in model["fit"]["speed"]["assumption"]
    )
    code, shown = run("info", "builtin")
    assert (code, "Runs as" in shown) == (0, True)
    assert "not yet: 'neo-desktop doctor --measure --model builtin' measures it" in " ".join(shown.split())
    code, shown = run("info", "no-such")
    assert (code, "no model named 'no-such'" in shown) == (1, True)


def test_of_a_divided_model_it_is_told_what_fits() -> None:
    code, whole = run("info", "neo-desktop-guide", "--tensor-parallel", "2")
    assert (code, "22 MB" in whole, "chats at once" in whole) == (0, True, True)
    code, shown = run("info", "neo-desktop-guide", "--tensor-parallel", "3")
    assert (code, "4 heads cannot be divided among 3 processes" in shown) == (0, True)


def test_models_to_pull_are_recommended_with_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    for each in RECOMMENDED:
        check_name(each.name)
    assert [each.size_bytes for each in RECOMMENDED] == sorted(each.size_bytes for each in RECOMMENDED)
    code, shown = run("recommended")
    assert code == 0
    assert all(each.name in shown for each in RECOMMENDED)
    monkeypatch.setattr(ModelLoader, "_free", lambda *_: FreeMemory(4 * GIB, None))
    shown = run("recommended", columns=80)[1]
    rows = {line.split()[0]: line for line in shown.splitlines() if line}
    assert "does not fit" in rows["Qwen/Qwen3-32B-GGUF:Q4_K_M"]
    assert "does not fit" not in rows["smollm2-135m-instruct"]


def test_a_gguf_file_is_listed_described_and_removed(tmp_path: Path, data: Path) -> None:
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    model = LlamaForCausalLM(config)
    (tmp_path / "mine" / "several").mkdir(parents=True)
    for name in ("one.gguf", "several/a.gguf", "several/b.gguf"):
        write_gguf(tmp_path / "mine" / name, model, type_name="Q4_0")
    code, shown = run("list", "--models-dir", str(tmp_path / "mine"))
    assert code == 0
    assert all(name in shown for name in ("one", "several/a", "several/b"))
    code, shown = run("info", "one", "--models-dir", str(tmp_path / "mine"))
    by_path, by_name = (
        text.partition("Measured")[0].split()  # then the command to measure it, by the same name
        for text in (run("info", str(tmp_path / "mine" / "one.gguf"))[1], shown)
    )
    assert by_path == by_name
    assert code == 0
    assert "Q4_0" in shown
    assert "float32, weights kept as they are" in shown
    (data / "models").mkdir(parents=True)
    pulled = write_gguf(data / "models" / "pulled.gguf", model)
    assert run("remove", "pulled", "--yes")[0] == 0
    assert not pulled.exists()


@pytest.mark.parametrize("where", ["elsewhere", "link"])
def test_only_pulled_models_are_removed(checkpoint: Path, data: Path, tmp_path: Path, where: str) -> None:
    mine = tmp_path / "mine" / "tiny"
    shutil.copytree(checkpoint, mine)
    if where == "link":
        (data / "models").mkdir(parents=True)
        (data / "models" / "tiny").symlink_to(mine)
        code, _ = run("remove", "tiny", "--yes")
    else:
        code, _ = run("remove", str(mine), "--yes")
        with pytest.raises(PullError):
            pulling.remove(mine)
    assert code == 1
    assert (mine / "config.json").exists()
    with pytest.raises(PullError):
        pulling.remove(data / "models")
