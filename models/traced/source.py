"""The source of a `transformers` configuration."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Source:
    """A folder with a config.json, or a file with equivalent metadata.

    Args:
        config_json: contents of a config.json derived from a file; None: a folder.
        untied: parameters that are separate weights, although the configuration ties them.
        transposed: linear layers whose columns are sorted by a head's number in its group, not by group, as
            (end of the module's name, groups, heads per group).
        is_long: LongRoPE has the frequencies of prompts beyond the original context, for all prompts.
    """

    path: Path
    config_json: str | None = None
    untied: tuple[str, ...] = ()
    transposed: tuple[tuple[str, int, int], ...] = ()
    is_long: bool = False

    @property
    def named(self) -> Path:
        return self.path / "config.json" if self.config_json is None else self.path

    def config(self) -> Any:
        """Return the configuration. Raises exceptions of transformers; ImportError if it is not installed."""
        from transformers import AutoConfig  # noqa: PLC0415 - large, and rarely needed

        if self.config_json is None:
            return AutoConfig.from_pretrained(self.path, local_files_only=True, trust_remote_code=False)
        return AutoConfig.for_model(**json.loads(self.config_json))
