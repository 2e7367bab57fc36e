"""A few good models by size, none of which asks for an account, and whether they fit here."""

from dataclasses import dataclass

from neo_desktop.app.shelf import packaged_model
from neo_desktop.app.shelf.fits import Fit
from neo_desktop.app.shelf.model_loader import ModelLoader
from neo_desktop.models.shapes import shape
from neo_desktop.models.stored_form import uniform_form


@dataclass(frozen=True, slots=True)
class Recommended:
    """A model to pull."""

    name: str  # as `pull` takes it
    size_bytes: int  # to download, about
    licence: str
    shape: str
    type_name: str  # of most of its matrices

    def fit(self, loader: ModelLoader) -> Fit:
        """Return what it would bring here."""
        config = shape(self.shape)
        return loader.fit(config, uniform_form(config, self.type_name), is_loaded=False)


def _qwen(name: str, gigabytes: float, shape_name: str) -> Recommended:
    return Recommended(f"Qwen/{name}-GGUF:Q4_K_M", int(gigabytes * 1e9), "Apache-2.0", shape_name, "Q4_K")


RECOMMENDED = (
    Recommended(
        packaged_model.NAME, packaged_model.PACKAGE_BYTES, packaged_model.LICENCE, "smollm2-135m", "Q4_1"
    ),
    _qwen("Qwen2.5-0.5B-Instruct", 0.5, "qwen2.5-0.5b"),
    _qwen("Qwen2.5-1.5B-Instruct", 1.1, "qwen2.5-1.5b"),
    _qwen("Qwen3-4B", 2.5, "qwen3-4b"),
    _qwen("Qwen3-8B", 5.0, "qwen3-8b"),
    _qwen("Qwen3-14B", 9.0, "qwen3-14b"),
    _qwen("Qwen3-32B", 19.8, "qwen3-32b"),
)
