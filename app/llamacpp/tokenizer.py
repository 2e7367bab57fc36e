"""llama.cpp's own tokenizer, which knows every kind of vocabulary that its models have."""

from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import models

from neo_desktop.app.llamacpp.library import LlamaModel
from neo_desktop.models.tokenizer import Tokenizer

_ROLES = {"bos": "bos_token", "eos": "eos_token", "pad": "pad_token"}


class LlamaCppTokenizer(Tokenizer):
    """See `Tokenizer`; it outlives the weights. In another process it opens the file again.

    Args:
        file: that llama.cpp has loaded already: a hostile one may end the process that loads it first.
    """

    def __init__(self, file: Path) -> None:
        model = LlamaModel(file, vocabulary_only=True)
        roles = {role: model.role_token(key) for key, role in _ROLES.items()}
        super().__init__(
            tokenizers.Tokenizer(models.BPE()),  # of which nothing is asked
            {role: model.token_name(token) for role, token in roles.items() if token is not None},
            model.chat_template,
        )
        self._model = model
        self._roles = roles
        self._controls = model.control_tokens()
        self._ends = model.end_tokens()
        self.vocab_size = model.num_tokens

    def __reduce__(self) -> tuple[Any, ...]:
        return LlamaCppTokenizer, (self._model.file,)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """All tokens that end an answer."""
        return self._ends

    @property
    def special_token_ids(self) -> tuple[int, ...]:
        """See `Tokenizer`."""
        return tuple(sorted(self._controls))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """See `Tokenizer`."""
        try:
            data = text.encode()
        except UnicodeEncodeError:
            raise ValueError(
                "The text holds half of a surrogate pair, which is no character: remove it."
            ) from None
        return self._model.tokenise(data, add_special=add_special_tokens)

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        """See `Tokenizer`."""
        known = [token_id for token_id in token_ids if self._is_known(token_id)]
        if not known:
            return ""
        return self._model.text(known, with_special=not skip_special_tokens).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """See `Tokenizer`."""
        return self._model.piece(token_id) if self._is_known(token_id) else b""

    def _has_text(self, token_id: int) -> bool:
        return self._is_known(token_id) and token_id not in self._controls

    def _is_known(self, token_id: int) -> bool:
        return 0 <= token_id < self.vocab_size

    def _role_id(self, role: str) -> int | None:
        return self._roles.get(role)
