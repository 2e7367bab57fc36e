"""What tells `transformers` what a model is like."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Source:
    """A folder with a config.json, or a file of which the same is known.

    Args:
        path: of the folder, or of the file.
        config_json: of a file: what a config.json would say; None: it is a folder.
        untied: parameters that are weights of their own, though the configuration ties them to others.
    """

    path: Path
    config_json: str | None = None
    untied: tuple[str, ...] = ()

    @property
    def named(self) -> Path:
        """Return what errors name."""
        return self.path / "config.json" if self.config_json is None else self.path

    def config(self) -> Any:
        """Return the configuration; raises whatever transformers raises, ImportError where it is missing."""
        from transformers import AutoConfig  # noqa: PLC0415 - large, and rarely needed

        if self.config_json is None:
            return AutoConfig.from_pretrained(self.path, local_files_only=True, trust_remote_code=False)
        return AutoConfig.for_model(**json.loads(self.config_json))
