"""Images with a GGUF model and its mmproj file: the tokens of transformers with the original folder."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_towers import WRITTEN, write_files, write_tower
from transformers import AutoModelForImageTextToText
from vision_models import greedy, picture

from neo_desktop.engine.engine import Engine
from neo_desktop.engine.loading import identity_of
from neo_desktop.engine.options import EngineOptions
from neo_desktop.engine.sampling_params import SamplingParams
from neo_desktop.models.checkpoint import open_checkpoint
from neo_desktop.models.gguf.checkpoint import GGUFCheckpoint
from neo_desktop.models.json_file import ModelError
from neo_desktop.models.vision.prompt import with_images
from neo_desktop.models.vision.tower import Vision

TOKENS = 10
GREEDY = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
FILES = [picture(50, 40, 1), picture(30, 90, 2)]
CHATS = [("*", (0,)), ("More than a block of text: * and * after it", (1, 0)), ("no image", ())]


def engine_of(path: Path, **options: Any) -> Engine:
    sizes: Any = {"cpu_cache_tokens": 2048, "max_batch_tokens": 48, "max_batch_requests": 6}
    return Engine.from_options(EngineOptions(model=path, device="cpu", **(sizes | options)))


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", WRITTEN)
def test_two_files_give_the_tokens_of_the_folder(family: str, tmp_path: Path) -> None:
    path, _ = write_files(tmp_path, family)
    with engine_of(path) as engine:
        assert engine.vision is not None
        prompts = []
        for text, images in CHATS:
            written = f"<|user|>{text.replace('*', WRITTEN[family].mark)}<|end|><|assistant|>"
            seen = [engine.vision.see(FILES[number]) for number in images]
            prompts.append(with_images(engine.tokenizer.marks.split(written), seen))
        outputs = engine.generate(prompts, GREEDY)
        for prompt, output, (_, images) in zip(prompts, outputs, CHATS, strict=True):
            token_ids = engine.prepare(prompt, GREEDY).token_ids
            expected = greedy(tmp_path, token_ids, [FILES[number] for number in images], TOKENS)
            assert list(output.token_ids) == expected


def rows(checkpoint: GGUFCheckpoint) -> torch.Tensor:
    """Return the embeddings of the first picture."""
    config: Any = checkpoint.config()
    return torch.from_numpy(Vision(checkpoint, config, checkpoint.tokenizer()).see(FILES[0]).embeddings)


@pytest.mark.parametrize(("type_name", "is_old"), [("Q8_0", False), ("F16", True)])
def test_quantised_and_old_towers_see_what_transformers_sees(
    type_name: str, is_old: bool, tmp_path: Path
) -> None:
    path, mmproj = write_files(tmp_path, "gemma3", type_name, is_old=is_old)
    checkpoint = open_checkpoint(path)
    assert isinstance(checkpoint, GGUFCheckpoint)
    found = rows(checkpoint)
    mmproj.unlink()
    (tmp_path / "model.gguf").unlink()
    folder = open_checkpoint(tmp_path)
    config: Any = folder.config()
    expected = torch.from_numpy(Vision(folder, config, folder.tokenizer()).see(FILES[0]).embeddings)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_files(tmp_path_factory.mktemp("towers"), "qwen3-vl")


@pytest.fixture
def model(files: tuple[Path, Path], tmp_path: Path) -> Path:
    """The model's file in a folder of its own."""
    path = tmp_path / "model.gguf"
    path.symlink_to(files[0])
    return path


def opened(path: Path, mmproj: Path | None = None) -> GGUFCheckpoint:
    checkpoint = open_checkpoint(path, mmproj)
    assert isinstance(checkpoint, GGUFCheckpoint)
    return checkpoint


def test_without_a_tower_the_model_reads_text_and_says_what_it_needs(
    model: Path, files: tuple[Path, Path]
) -> None:
    blind = opened(model)
    assert "mmproj" in blind.why_no_tower
    assert blind.config().architecture == "Qwen3ForCausalLM"  # computed without transformers
    seeing = opened(model, files[1])
    assert seeing.config().architecture == "Qwen3VLForConditionalGeneration"
    assert identity_of(blind, blind.weights()) != identity_of(seeing, seeing.weights())


def test_a_tower_without_transformers_is_left_alone(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "install 'neo-desktop[transformers]'" in opened(files[0]).why_no_tower
    assert opened(files[0]).config().architecture == "Qwen3ForCausalLM"
    with pytest.raises(ModelError, match=r"needs transformers: .*install"):
        opened(*files).config()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"clip.projector_type": "resampler"}, "a vision tower of the kind 'resampler', which is not supp"),
        ({"clip.projector_type": "gemma3"}, "belongs to another model"),
        ({"clip.vision.projection_dim": 65}, "belongs to another model: its rows of images have 65 numbers"),
        ({"clip.vision.n_wa_pattern": 8}, "sets clip.vision.n_wa_pattern, which is not supported"),
    ],
)
def test_towers_that_are_not_the_models_are_refused(
    changes: dict[str, Any], message: str, model: Path, files: tuple[Path, Path]
) -> None:
    make: Any = AutoModelForImageTextToText
    source = make.from_pretrained(files[0].parent)
    other = files[0].parent / f"{model.parent.name}.gguf"
    write_tower(other, "qwen3-vl", source, changes=changes)
    with pytest.raises(ModelError, match=message):
        opened(model, other).config()
    other = other.rename(model.parent / "mmproj-other.gguf")
    beside = opened(model)
    assert message in beside.why_no_tower
    assert beside.config().architecture == "Qwen3ForCausalLM"


def test_unknown_and_missing_tensors_are_refused(model: Path, files: tuple[Path, Path]) -> None:
    make: Any = AutoModelForImageTextToText
    source = make.from_pretrained(files[0].parent)
    other = files[0].parent / "other.gguf"
    write_tower(other, "qwen3-vl", source, tensors={"v.class_embd": torch.ones(32)})
    with pytest.raises(ModelError, match=r"has v\.class_embd, which is not known"):
        rows(opened(model, other))
    write_tower(other, "qwen3-vl", source, changes={"clip.vision.block_count": 4})
    with pytest.raises(ModelError, match=r"lacks v\.blk\.3\."):
        rows(opened(model, other))


def test_files_that_are_no_towers_are_refused(files: tuple[Path, Path], model: Path) -> None:
    with pytest.raises(ModelError, match="is not a vision tower"):
        opened(model, files[0]).config()
    with pytest.raises(ModelError, match="does not exist"):
        opened(model, model.parent / "none.gguf").config()
    with pytest.raises(ModelError, match="mmproj does not go with it"):
        open_checkpoint(files[0].parent, files[1])


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", ["qwen3-vl", "mistral3", "mistral3 of llama"])
def test_text_alone_needs_no_tower(family: str, tmp_path: Path) -> None:
    path, mmproj = write_files(tmp_path, family)
    mmproj.unlink()
    with engine_of(path) as engine:
        assert engine.vision is None
        prompt = engine.prepare("no image, but more than a block of text", GREEDY).token_ids
        (output,) = engine.generate([list(prompt)], GREEDY)
    assert list(output.token_ids) == greedy(tmp_path, prompt, [], TOKENS)


def test_a_damaged_tower_beside_a_model_leaves_its_text(model: Path, files: tuple[Path, Path]) -> None:
    make: Any = AutoModelForImageTextToText
    source = make.from_pretrained(files[0].parent)
    other = files[0].parent / f"{model.parent.name}-damaged.gguf"
    write_tower(other, "qwen3-vl", source, changes={"clip.vision.attention.head_count": None})
    with pytest.raises(ModelError):
        opened(model, other).config()
    other.rename(model.parent / "mmproj-damaged.gguf")
    beside = opened(model)
    assert beside.config().architecture == "Qwen3ForCausalLM"
    assert beside.why_no_tower
