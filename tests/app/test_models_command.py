"""`neo-desktop models`: listing, pulling from a fake hub, removing."""

import json
import shutil
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import huggingface_hub
import pytest
from checkpoints import save_checkpoint
from gguf_files import write_gguf
from huggingface_hub import errors
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from neo_desktop.app.cli import app
from neo_desktop.app.shelf import pull as pulling
from neo_desktop.app.shelf.catalogue import Catalogue
from neo_desktop.app.shelf.pull import PullError, PullStoppedError, pull


@dataclass
class FakeHub:
    """One model; `error` breaks everything."""

    source: Path
    extra: tuple[str, ...] = ()
    error: Exception | None = None

    def snapshot_download(
        self, name: str, *, local_dir: Path, allow_patterns: list[str], dry_run: bool
    ) -> list[Any]:
        assert dry_run
        if self.error is not None:
            raise self.error
        files = [file for file in self.source.iterdir() if any(file.match(each) for each in allow_patterns)]
        return [
            FakeFile(file.name, file.stat().st_size, not (local_dir / file.name).exists()) for file in files
        ]

    def hf_hub_download(self, name: str, file: str, *, local_dir: Path, tqdm_class: Any) -> str:
        local_dir.mkdir(parents=True, exist_ok=True)
        size = (self.source / file).stat().st_size
        bar = tqdm_class(total=size, initial=0, unit="B", name="huggingface_hub.http_get")
        for _ in range(4):
            bar.update(size // 4)
        shutil.copy(self.source / file, local_dir / file)
        return str(local_dir / file)


@dataclass
class FakeFile:
    filename: str
    file_size: int
    will_download: bool


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_checkpoint(tmp_path_factory.mktemp("hub") / "tiny", "llama")
    (folder / "modeling_tiny.py").write_text("raise SystemExit")
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    return folder


@pytest.fixture(autouse=True)
def data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("NEO_DESKTOP_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    return tmp_path / "data"


@pytest.fixture
def hub(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    fake = FakeHub(checkpoint)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake.snapshot_download)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fake.hf_hub_download)
    return fake


def run(*arguments: str, answer: str | None = None) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["models", *arguments], input=answer, env={"COLUMNS": "200"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        return 1, str(result.exception)
    return result.exit_code, result.output


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
    code, shown = run("info", "no-such")
    assert (code, "no-such is neither" in shown) == (1, True)


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
    assert code == 0
    assert "Q4_0" in shown
    assert "float32, weights as they are stored" in shown
    (data / "models").mkdir(parents=True)
    pulled = write_gguf(data / "models" / "pulled.gguf", model)
    assert run("remove", "pulled", "--yes")[0] == 0
    assert not pulled.exists()


def test_a_model_is_pulled_without_code_or_pickles_and_can_be_removed(hub: FakeHub, data: Path) -> None:
    shares: list[float] = []
    folder = pull("org/tiny", lambda share, what: shares.append(share))
    assert folder == data / "models" / "org" / "tiny"
    names = {file.name for file in folder.iterdir()}
    assert names >= {"config.json", "model.safetensors", "tokenizer.json"}
    assert not names & {"modeling_tiny.py", "pytorch_model.bin"}
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert len(set(shares)) > 3
    assert Catalogue().get("org/tiny").summary.reason is None
    code, shown = run("remove", "org/tiny", answer="n\n")
    assert (code, folder.exists()) == (1, True)
    code, shown = run("remove", "org/tiny", "--yes")
    assert (code, folder.exists(), folder.parent.exists()) == (0, False, False), shown


def test_a_stopped_download_keeps_what_has_arrived(hub: FakeHub, data: Path) -> None:
    stopped = threading.Event()

    def stop_in_the_weights(share: float, what: str) -> None:
        if what == "model.safetensors" and share > 0.5:
            stopped.set()

    with pytest.raises(PullStoppedError):
        pull("org/tiny", stop_in_the_weights, stopped)
    assert (data / "models" / "org" / "tiny" / "config.json").exists()
    told: list[str] = []
    pull("org/tiny", lambda share, what: told.append(what))
    assert set(told) == {"Asking huggingface.co", "model.safetensors", "Done"}


ANSWER = httpx.Response(404, request=httpx.Request("GET", "https://huggingface.co"))


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (errors.LocalEntryNotFoundError("offline"), "huggingface.co cannot be reached: check the connection"),
        (ConnectionError("no route"), "huggingface.co cannot be reached"),
        (errors.RepositoryNotFoundError("404", response=ANSWER), "there is no model org/tiny"),
        (errors.GatedRepoError("403", response=ANSWER), "licence"),
        (RuntimeError("teapot"), "teapot"),
    ],
)
def test_what_goes_wrong_is_said_in_a_sentence(hub: FakeHub, error: Exception, sentence: str) -> None:
    hub.error = error
    code, shown = run("pull", "org/tiny")
    assert code == 1
    assert sentence in shown


@pytest.mark.parametrize(
    "name", ["tiny", "../evil", "a/../b", "org/tiny/x", "org/../../x", "/etc/passwd", ""]
)
def test_what_is_no_name_is_refused(hub: FakeHub, name: str) -> None:
    with pytest.raises(PullError, match="no model's name"):
        pull(name, lambda share, what: None)


def test_a_disk_without_room_is_seen_before_anything_is_downloaded(
    hub: FakeHub, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pulling, "SPARE_BYTES", 10**18)
    code, shown = run("pull", "org/tiny")
    assert (code, "make room" in shown) == (1, True)
    assert not data.exists()


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
