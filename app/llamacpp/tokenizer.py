"""llama.cpp's own tokenizer, which knows every kind of vocabulary that its models have."""

from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import models

from neo_desktop.app.llamacpp.library import LlamaModel
from neo_desktop.models import harmony
from neo_desktop.models.marks import SIGNS, ChatText, Marks
from neo_desktop.models.tokenizer import TOOL_USE, Tokenizer, control_texts

_ROLES = {"bos": "bos_token", "eos": "eos_token", "pad": "pad_token"}


class LlamaCppTokenizer(Tokenizer):
    """A `Tokenizer` that outlives the weights. In another process it opens the file again.

    Args:
        file: that llama.cpp has loaded already: a hostile one may end the process that loads it first.
    """

    def __init__(self, file: Path) -> None:
        model = LlamaModel(file, vocabulary_only=True)
        roles = {role: model.role_token(key) for key, role in _ROLES.items()}
        super().__init__(
            tokenizers.Tokenizer(models.BPE()),  # of which nothing is asked
            {role: model.token_name(token) for role, token in roles.items() if token is not None},
            model.chat_template(),
            model.chat_template(TOOL_USE),
        )
        self._model = model
        self._roles = roles
        self._controls = model.tokens_with("CONTROL", "UNKNOWN")  # they are no text
        self._ends = model.end_tokens()
        self._harmony = harmony.special_of({token: model.token_name(token) for token in self._controls})
        self._marked = {model.token_name(token): token for token in self._controls}
        # llama.cpp finds them in every text.
        self._found_anywhere = {
            model.token_name(token): token for token in model.tokens_with("USER_DEFINED") - self._controls
        }
        self._strips = [model.tokens_with(name) for name in ("RSTRIP", "LSTRIP")]
        self.vocab_size = model.num_tokens

    def __reduce__(self) -> tuple[Any, ...]:
        return LlamaCppTokenizer, (self._model.file,)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self._ends

    @property
    def special_token_ids(self) -> tuple[int, ...]:
        return tuple(sorted(self._controls))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self._model.tokenise(_data(text), add_special=add_special_tokens)

    def _control_texts(self) -> tuple[list[str], list[str]]:
        return control_texts(self._marked, self._found_anywhere, f"{self.chat_template}{self.tool_template}")

    def _encode_chat(self, chat: ChatText) -> list[int]:
        token_ids: list[int] = []
        ids = self._found_anywhere | self._marked
        after, before = self._strips
        for at in range(0, len(chat.pieces), 2):
            text = chat.pieces[at]
            if at and ids[chat.pieces[at - 1]] in after:
                text = text.lstrip()
            for mark in chat.pieces[at + 1 : at + 2]:
                text = text.rstrip() if ids[mark] in before else text
            for part in self._apart(text):
                token_ids += self._model.tokenise(_data(part), add_special=False, parse_special=False)
            token_ids += [ids[mark] for mark in chat.pieces[at + 1 : at + 2]]
        return token_ids

    def _apart(self, text: str) -> list[str]:
        """Cut a text within each mark that llama.cpp finds even where control tokens are not recognised."""
        sign = next((sign for sign in SIGNS if sign not in text), "")
        cut = self._cut_marks.broken(text, sign).split(sign) if sign else [*text]
        return [part for part in cut if part]

    @cached_property
    def _cut_marks(self) -> Marks:
        return Marks(self.marks.texts & self._found_anywhere.keys())

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        known = [token_id for token_id in token_ids if self._is_known(token_id)]
        if not known:
            return ""
        return self._model.text(known, with_special=not skip_special_tokens).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return self._model.piece(token_id) if self._is_known(token_id) else b""

    def _has_text(self, token_id: int) -> bool:
        return self._is_known(token_id) and token_id not in self._controls

    def _is_known(self, token_id: int) -> bool:
        return 0 <= token_id < self.vocab_size

    def _role_id(self, role: str) -> int | None:
        return self._roles.get(role)


def _data(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise ValueError(
            "The text holds half of a surrogate pair, which is no character: remove it."
        ) from None
