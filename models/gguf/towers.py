"""Vision towers in GGUF files as `transformers` describes them: config.json, image processor, parameters."""

from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from neo_desktop.models.gguf.family import Values
from neo_desktop.models.gguf.tower_file import TowerFile
from neo_desktop.models.gguf.tower_kinds import KINDS
from neo_desktop.models.gguf.vocabulary import Vocabulary
from neo_desktop.models.json_file import INSTALL_TRANSFORMERS, ModelError

_ENDS = ".weight", ".bias", ".input_min", ".input_max", ".output_min", ".output_max"
_UP, _DOWN = ".ffn_up.", ".ffn_down."


class Tower:
    """The vision tower of a model in GGUF files.

    Args:
        architecture: llama.cpp's name for the model's text.

    Raise ModelError if the file is damaged, of an unknown kind, or belongs to another text.
    """

    def __init__(self, path: Path, architecture: str, hidden_size: int) -> None:
        self.path, self._architecture = path, architecture
        self._own = own = TowerFile(path)
        if own.kind not in KINDS:
            raise ModelError(
                f"{path} has a vision tower of the kind {own.kind[:40]!r}, which is not supported: known "
                f"are {', '.join(KINDS)}."
            )
        self._kind = KINDS[own.kind]
        width = own.size("projection_dim")
        if architecture not in self._kind.models or width != hidden_size:
            raise ModelError(
                f"{path} belongs to another model: its rows of images have {width} numbers for "
                f"{', '.join(self._kind.models)}, but this model is {architecture} with {hidden_size}."
            )
        if (unknown := own.unknown()) is not None:
            raise ModelError(f"{path} sets clip.vision.{unknown}, which is not supported.")

    def values(self, text: Values, vocabulary: Vocabulary) -> Values:
        """Return the values of config.json of the model with images, from its text's values.

        Raise ModelError if the tower's entries are missing or out of range, or the vocabulary lacks a token.
        """
        described = self._kind.models[self._architecture]
        text = text | {"pad_token_id": vocabulary.token_id("padding") or 0}  # stands for rows of images
        number_of = {token: number for number, token in enumerate(vocabulary.tokens)}
        for token in self._kind.tokens.values():
            if token not in number_of:
                raise ModelError(
                    f"{vocabulary.path} lacks the token {token}, which {self.path.name} needs: choose "
                    "another file of this model, or move the mmproj file away."
                )
        return {
            "model_type": described.model_type,
            "architectures": [described.architecture],
            "tie_word_embeddings": text["tie_word_embeddings"],
            "text_config": text | {"model_type": described.text_type},
            **self._kind.values(self._own, text),
            **{key: number_of[token] for key, token in self._kind.tokens.items()},
        }

    def processor(self) -> Any:
        import transformers  # noqa: PLC0415 - large, and rarely needed

        make: Any = getattr(transformers, f"{self._kind.processor}Pil")
        return make(**self._kind.settings(self._own))

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return a parameter in float32, by its name within the base model.

        Raise ModelError if the file lacks it, or has another shape.
        """
        stored = self._stored(name)
        numbers = self._own.floats(stored)
        if f"{stored}.1" in self._own.shapes:  # a convolution over two pictures, cut into two
            numbers = torch.stack((numbers, self._own.floats(f"{stored}.1")), dim=2)
        for end, undo in self._kind.undo.items():
            if stored.endswith(end):
                try:
                    numbers = undo(self._own, numbers)
                except RuntimeError:  # its shape is another
                    raise ModelError(
                        f"{stored} in {self.path} has the shape {list(numbers.shape)}, which no tower of "
                        "this kind has: download it again."
                    ) from None
        numbers = numbers.reshape(shape) if numbers.numel() == 1 else numbers  # a scalar
        if numbers.shape != shape:
            raise ModelError(
                f"{stored} in {self.path} has the shape {list(numbers.shape)}, but {list(shape)} was "
                "expected: download it again."
            )
        return numbers

    def check_all_read(self) -> None:
        """Raise ModelError for a tensor that no parameter needed."""
        left = [name for name in self._own.unread() if not name.startswith(self._kind.idle)]
        if left:
            raise ModelError(
                f"{self.path} has {left[0]}, which is not known, so images of this file are not supported."
            )

    def _stored(self, name: str) -> str:
        """Return the name of a parameter's tensor."""
        module, _, end = name.rpartition(".")
        of_own = self._kind.named(self._own)
        if module in of_own:
            return f"{of_own[module]}.{end}"
        for ours, theirs in self._kind.renamed.items():
            name = name.replace(ours, theirs)
        stored: str | None = self._table.get_name(name, try_suffixes=_ENDS)
        if stored is None:
            raise ModelError(f"{self.path}: gguf has no name for {name}, which its vision tower needs.")
        if self._is_swapped:
            up, down = (_DOWN, _UP) if _UP in stored else (_UP, _DOWN)
            stored = stored.replace(down, up)
        return stored

    @cached_property
    def _table(self) -> Any:
        import gguf  # noqa: PLC0415 - takes a fifth of a second

        numbers = max(self._own.size("block_count"), 3)  # also those of the projector's matrices
        return gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, numbers)

    @cached_property
    def _is_swapped(self) -> bool:
        """True in old files, where the two matrices of an MLP have each other's names."""
        width, wide = self._own.size("embedding_length"), self._own.size("feed_forward_length")
        return width != wide and self._own.shapes.get(f"v.blk.0{_DOWN}weight") == (wide, width)


def is_tower(name: str) -> bool:
    """Return True if a file's name is that of a vision tower."""
    return "mmproj" in name.lower()


def find_tower(model: Path, architecture: str, hidden_size: int, given: Path | None) -> Tower | str:
    """Return the vision tower of a model: the file that is given, or one beside the model.

    Returns:
        A sentence, if there is none.

    Raise ModelError if the given file cannot be used.
    """
    if given is not None:
        if not given.is_file():
            raise ModelError(f"{given} does not exist: name the model's mmproj file.")
        if not _can_see():
            raise ModelError(f"{given} needs transformers: {INSTALL_TRANSFORMERS}, or leave mmproj out.")
        return Tower(given, architecture, hidden_size)
    if not any(architecture in kind.models for kind in KINDS.values()):
        return f"images of {architecture} GGUF files are not supported; its original folder may read them"
    reason = "images need its mmproj-*.gguf beside the model's file, or named by --mmproj"
    for path in sorted(path for path in model.parent.glob("*.gguf") if is_tower(path.name)):
        try:
            tower = Tower(path, architecture, hidden_size)
        except ModelError as error:
            reason = str(error).rstrip(".")
            continue
        return tower if _can_see() else f"{INSTALL_TRANSFORMERS} lets it see images"
    return reason


def _can_see() -> bool:
    return all(find_spec(name) is not None for name in ("transformers", "PIL"))
