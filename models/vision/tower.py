"""Vision towers of `transformers`, which compute the rows of images on the CPU."""

import logging
import threading
from collections.abc import Callable, Mapping
from hashlib import blake2b
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from neo_desktop.models.checkpoint import Checkpoint
from neo_desktop.models.config import ModelConfig
from neo_desktop.models.gguf.checkpoint import GGUFCheckpoint
from neo_desktop.models.json_file import INSTALL_TRANSFORMERS, JsonFile, ModelError
from neo_desktop.models.tokenizer import Tokenizer
from neo_desktop.models.traced.config import TracedConfig
from neo_desktop.models.traced.sizes import quiet
from neo_desktop.models.vision.families import FAMILIES, Words, rows_of
from neo_desktop.models.vision.pictures import decode
from neo_desktop.models.vision.prompt import SeenImage

logger = logging.getLogger(__name__)

TEXT_ONLY = "this model reads text only"
PROCESSORS = ("preprocessor_config.json", "processor_config.json")  # files that describe image processors


class Vision:
    """Reads images for a model; thread-safe.

    The tower's weights are read at the first image, and stay in host memory in float32.
    """

    def __init__(self, checkpoint: Checkpoint, config: TracedConfig, tokenizer: Tokenizer) -> None:
        self._checkpoint, self._config = checkpoint, config
        self._tower = checkpoint.tower if isinstance(checkpoint, GGUFCheckpoint) else None
        if self._tower is not None:
            logger.info("%s: images by %s", checkpoint.name, self._tower.path.name)
        with quiet():
            self._described: Any = config.source.config()
        self._family = FAMILIES[self._described.model_type]
        self._words = Words.read(checkpoint.path, tokenizer.token_text)
        self.mark = self._family.mark(self._described, self._words)
        self._lock = threading.Lock()
        self._loaded: tuple[Any, Any, bytes] | None = None  # image processor, model, digest of settings

    def see(self, data: bytes) -> SeenImage:
        """Read an image file.

        Raise ModelError if the tower's weights or the image processor's settings cannot be used, and
        ValueError if the file cannot be used.
        """
        from neo_desktop.models.traced.capture import TRACING  # noqa: PLC0415 - rarely needed

        picture = decode(data)
        with self._lock, TRACING:  # tracing replaces functions of torch, for all threads
            if self._loaded is None:
                self._loaded = self._load()
            processor, model, settings = self._loaded
            try:
                inputs: Mapping[str, Tensor] = processor(
                    picture, return_tensors="pt", **self._family.settings(self._described)
                )
            except ValueError as error:
                raise ValueError(f"the image cannot be used: {error}") from None
            with torch.inference_mode():
                given = {name: inputs[name] for name in self._family.inputs}
                rows = rows_of(model.get_image_features(**given, return_dict=True))
        return SeenImage(
            blake2b(data, key=settings, digest_size=32).digest(),
            self.mark,
            self._family.text(self._described, self._words, inputs),
            self._described.image_token_id,
            rows.float().numpy(),
            self._family.sight(self._described),
            self._family.grid(self._described, inputs),
        )

    def _load(self) -> tuple[Any, Any, bytes]:
        from transformers import AutoModelForImageTextToText  # noqa: PLC0415 - large
        from transformers.initialization import no_init_weights  # noqa: PLC0415 - as above

        described = self._described
        with quiet():
            processor = self._processor()
            make: Any = AutoModelForImageTextToText
            with torch.device("meta"):
                model = make.from_config(described).base_model.eval()
            with no_init_weights():
                for name, build in self._family.parts.items():
                    setattr(model, name, build(described, type(getattr(model, name))).float().eval())
        read = self._reader()
        for part in self._family.parts:
            for name, value in getattr(model, part).state_dict().items():
                value.copy_(read(f"{part}.{name}", tuple(value.shape)))
        if self._tower is not None:
            self._tower.check_all_read()
        settings = blake2b(repr(processor.to_dict()).encode(), digest_size=32).digest()
        return processor, model, settings

    def _processor(self) -> Any:
        from transformers import AutoImageProcessor  # noqa: PLC0415 - large

        if self._tower is not None:
            return self._tower.processor()
        make: Any = AutoImageProcessor
        path = self._checkpoint.path
        return make.from_pretrained(path, local_files_only=True, trust_remote_code=False, backend="pil")

    def _reader(self) -> Callable[[str, tuple[int, ...]], Tensor]:
        """Return a function from a parameter's name and shape to its numbers.

        It raises ModelError if the checkpoint lacks the parameter, or has another shape.
        """
        if self._tower is not None:
            return self._tower.read
        weights = self._checkpoint.weights()
        weights.rename(self._config, ())

        def read(name: str, shape: tuple[int, ...]) -> Tensor:
            stored = weights.tensors.get(f"model.{name}")
            if stored is None or stored.is_quantised:
                state = "lacks" if stored is None else "has quantised"
                raise ModelError(
                    f"{self._checkpoint.name} {state} weights of its vision tower ({name}), so it "
                    "cannot read images: download the complete original folder."
                )
            if stored.shape != shape:
                raise ModelError(
                    f"{name} in {stored.file} has the shape {list(stored.shape)}, but config.json "
                    f"describes {list(shape)}: use the config.json that belongs to these weights."
                )
            return stored.read()

        return read


def why_blind(checkpoint: Checkpoint, config: ModelConfig) -> str | None:
    """Return the sentence that refuses images for a model; None: it can read them."""
    if isinstance(checkpoint, GGUFCheckpoint):
        return f"{TEXT_ONLY}: {checkpoint.why_no_tower}" if checkpoint.tower is None else None
    file = JsonFile.read(checkpoint.path / "config.json") if checkpoint.path.is_dir() else None
    if file is None or file.section("vision_config") is None:
        return TEXT_ONLY
    kind = file.raw("model_type")
    if kind not in FAMILIES:
        return f"{TEXT_ONLY}: images of {kind} models are not supported yet"
    if not isinstance(config, TracedConfig) or find_spec("PIL") is None:
        return f"{TEXT_ONLY}: {INSTALL_TRANSFORMERS} lets it see images"
    if not any((checkpoint.path / name).exists() for name in PROCESSORS):
        return f"{TEXT_ONLY}: its folder lacks {PROCESSORS[0]}, which images need"
    return None
