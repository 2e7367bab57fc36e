"""Images in prompts: models give the tokens of transformers, with all policies and after prefix hits."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from cost_models import machine
from safetensors.torch import load_file, save_file
from seeds import first
from vision_models import CASES, bomb, greedy, picture, save

from neo_desktop.engine.engine import Engine
from neo_desktop.engine.loading import load
from neo_desktop.engine.options import EngineOptions
from neo_desktop.engine.sampling_params import SamplingParams
from neo_desktop.engine.setup import take_memory
from neo_desktop.models.json_file import ModelError
from neo_desktop.models.vision.prompt import ImageText, with_images

TOKENS = 10
GREEDY = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
FILES = [picture(50, 40, 1), picture(30, 90, 2), picture(100, 100, 3, "JPEG")]
# Texts with asterisks in place of images, and the images.
CHATS = [
    ("*", (0,)),
    ("What do you see here? *", (1,)),
    ("More than a block of text: * and * after it", (2, 0)),
    ("**", (1, 0)),
    ("no image", ()),
]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("vision")

    def folder(family: str) -> Path:
        path = root / family
        return path if path.exists() else save(path, family)

    return folder


loaded = cache(load)


def engine_of(folder: Path, policy: str, **changes: object) -> Engine:
    """Return an engine; the model of unchanged folders is loaded once."""
    sizes = {
        "gpu_cache_tokens": 320,
        "cpu_cache_tokens": 640,
        "max_batch_tokens": 48,
        "max_batch_requests": 6,
    }
    options = EngineOptions(model=folder, device="cpu", **(sizes | changes))  # type: ignore[arg-type]
    model = loaded(EngineOptions(model=folder, device="cpu"))
    return Engine.from_parts(take_memory(model, options), policy, cost_model=machine(cpu_token_ms=1e-6))


def chat(engine: Engine, text: str, images: tuple[int, ...]) -> ImageText:
    """Return a chat as its template and the tokenizer write it."""
    assert engine.vision is not None
    mark = CASES[engine.model_name].mark
    written = engine.tokenizer.marks.split(f"<|user|>{text.replace('*', mark)}<|end|><|assistant|>")
    return with_images(written, [engine.vision.see(FILES[number]) for number in images])


def check(engine: Engine, folder: Path, tokens: int = TOKENS) -> None:
    params = replace(GREEDY, max_tokens=tokens)
    prompts = [chat(engine, *each) for each in CHATS]
    expected = [
        greedy(folder, engine.prepare(prompt, GREEDY).token_ids, [FILES[number] for number in images], tokens)
        for prompt, (_, images) in zip(prompts, CHATS, strict=True)
    ]
    assert [list(each.token_ids) for each in engine.generate(prompts, params)] == expected


@pytest.mark.parametrize("family", first(CASES))
def test_policies_chunks_and_preemptions_give_the_tokens_of_transformers(
    folder_of: Callable[[str], Path], family: str
) -> None:
    folder = folder_of(family)
    for policy in ("auto", "fastdecode", "pie"):  # KV on the device, on the CPU, and streamed
        with engine_of(folder, policy, gpu_cache_tokens=640 if "gemma4" in family else 320) as engine:
            check(engine, folder)
            before = engine._scheduler.counters.num_cached_tokens
            check(engine, folder)  # prompts come back
            assert engine._scheduler.counters.num_cached_tokens > before
    preemptions, room = 0, 224 if "gemma4" in family else 128
    for chunk, tokens in ((3, TOKENS), (32, 40)):
        with engine_of(
            folder, "gpu-only", gpu_cache_tokens=room, max_batch_tokens=chunk, max_batch_requests=3
        ) as engine:
            check(engine, folder, tokens)
            preemptions += engine._scheduler.counters.num_preemptions
    assert preemptions


def test_a_second_turn_reuses_the_kv_of_an_image_and_another_image_does_not(
    folder_of: Callable[[str], Path],
) -> None:
    folder = folder_of("mistral3")
    with engine_of(folder, "gpu-only", gpu_cache_tokens=1024) as engine:

        def ask(text: str, image: int) -> int:
            prompt = chat(engine, text, (image,))
            (completion,) = engine.generate([prompt], GREEDY)
            token_ids = engine.prepare(prompt, GREEDY).token_ids
            assert list(completion.token_ids) == greedy(folder, token_ids, [FILES[image]], TOKENS)
            return completion.num_cached_tokens

        first = "The same words in front of it * and after it"
        assert ask(first, 0) == 0
        assert ask(first + ", and more in the next turn", 0) >= 48
        FILES.append(picture(50, 40, 9))  # of the same size as image 0: the same tokens
        assert ask(first, len(FILES) - 1) == 16
        FILES.pop()


def test_folders_without_a_tower_or_a_processor_say_so(
    folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(folder_of("mistral3"), tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    (name,) = [name for name in weights if name.endswith("patch_conv.weight")]
    del weights[name]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with engine_of(folder, "gpu-only") as engine:
        assert engine.vision is not None
        with pytest.raises(ModelError, match="lacks weights of its vision tower"):
            engine.vision.see(FILES[0])
    folder = shutil.copytree(folder, tmp_path / "other")
    (folder / "preprocessor_config.json").unlink()
    with engine_of(folder, "gpu-only") as engine:
        assert engine.vision is None
        assert engine.blindness.endswith("its folder lacks preprocessor_config.json, which images need")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not a readable PNG, JPEG, WEBP or GIF"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "not a readable"),
        (picture(form="BMP"), "not a readable"),
        (FILES[0][:-200], "damaged"),
        (bomb(), "64,000,000 is the limit"),
    ],
)
def test_bad_files_are_refused(folder_of: Callable[[str], Path], data: bytes, reason: str) -> None:
    with engine_of(folder_of("mistral3"), "gpu-only") as engine:
        assert engine.vision is not None
        with pytest.raises(ValueError, match=reason):
            engine.vision.see(data)
