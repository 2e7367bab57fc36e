"""A few good models by size, all under Apache-2.0, none of which asks for an account."""

from typing import NamedTuple

from neo_desktop.app.shelf import packaged_model
from neo_desktop.app.shelf.fits import Fit
from neo_desktop.app.shelf.model_loader import ModelLoader
from neo_desktop.models.shapes import shape
from neo_desktop.models.stored_form import uniform_form


class Recommended(NamedTuple):
    name: str  # as `pull` takes it
    size_bytes: float  # to download, about
    shape: str
    type_name: str = "Q4_K"  # of most of its matrices

    def fit(self, loader: ModelLoader) -> Fit:
        config = shape(self.shape)
        return loader.fit(config, uniform_form(config, self.type_name))


RECOMMENDED = (
    Recommended(packaged_model.NAME, packaged_model.PACKAGE_BYTES, "smollm2-135m", "Q4_1"),
    Recommended("Qwen/Qwen2.5-0.5B-Instruct-GGUF:Q4_K_M", 0.5e9, "qwen2.5-0.5b"),
    Recommended("Qwen/Qwen2.5-1.5B-Instruct-GGUF:Q4_K_M", 1.1e9, "qwen2.5-1.5b"),
    Recommended("Qwen/Qwen3-4B-GGUF:Q4_K_M", 2.5e9, "qwen3-4b"),
    Recommended("Qwen/Qwen3-8B-GGUF:Q4_K_M", 5.0e9, "qwen3-8b"),
    Recommended("Qwen/Qwen3-14B-GGUF:Q4_K_M", 9.0e9, "qwen3-14b"),
    Recommended("Qwen/Qwen3-32B-GGUF:Q4_K_M", 19.8e9, "qwen3-32b"),
)
