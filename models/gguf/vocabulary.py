"""The vocabulary of a GGUF file: tokens, merges, scores and token types."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from neo_desktop.models import harmony
from neo_desktop.models.gguf.container import GGUFFile, NumberArray, StringArray
from neo_desktop.models.json_file import JsonFile, ModelError
from neo_desktop.models.limits import MAX_VOCAB_SIZE

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # types of tokens
_PREFIX = "tokenizer.ggml."
_TEMPLATE = "tokenizer.chat_template"

# Files name one or two tokens that end an answer. Like llama.cpp, recognise the others by their text.
_ENDS = frozenset(
    (
        *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>"),
        *("<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]"),
        *("<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<｜end▁of▁sentence｜>"),  # noqa: RUF001
    )
)


@dataclass(frozen=True)
class Vocabulary:
    """The entries that describe a tokenizer. A property raises ModelError if its entry is damaged.

    Args:
        entries: of the metadata, without `tokenizer.ggml.`
        templates: name → Jinja source of a chat template.
    """

    path: Path
    entries: JsonFile
    templates: dict[str, str]

    @classmethod
    def read(cls, file: GGUFFile) -> "Vocabulary":
        """Collect the entries; the properties check them on access."""
        entries = {
            key.removeprefix(_PREFIX): value
            for key, value in file.metadata.items()
            if key.startswith(_PREFIX)
        }
        templates: dict[str, str] = {}
        for key, template in file.metadata.items():
            name = key.removeprefix(_TEMPLATE)
            if name == key or (name and name[0] != "."):
                continue
            if not isinstance(template, str):
                raise ModelError(f"{file.path} has a chat_template that is not text: download it again.")
            templates[name.removeprefix(".") or "default"] = template
        return cls(file.path, JsonFile(file.path, entries), templates)

    @property
    def model(self) -> str:
        """Kind of tokenizer: "gpt2", "llama" or "gemma4"."""
        return self.entries.text("model")

    @property
    def pre(self) -> str:
        return self.entries.text("pre", "default")

    @cached_property
    def tokens(self) -> list[str]:
        """Distinct texts of the tokens, in the model's alphabet."""
        tokens = [text or f"[EMPTY_{index}]" for index, text in enumerate(self._texts("tokens"))]
        if len(tokens) > MAX_VOCAB_SIZE:
            raise ModelError(f"{self.path} has {len(tokens)} tokens, more than any model: download it again.")
        if self.model == "gemma4":  # a few texts appear twice in its files; the last one counts
            last = {text: index for index, text in enumerate(tokens)}
            tokens = [
                text if last[text] == index else f"[EARLIER_{index}]" for index, text in enumerate(tokens)
            ]
        if len(set(tokens)) != len(tokens):
            raise ModelError(f"{self.path} has the same token twice: download it again.")
        return tokens

    @cached_property
    def merges(self) -> list[str]:
        """Pairs of tokens to merge, "a b", highest priority first."""
        return self._texts("merges")

    @cached_property
    def types(self) -> list[int]:
        numbers = self._numbers("token_type", "iu")
        types = [NORMAL] * len(self.tokens) if numbers is None else numbers
        for token in self.end_ids:
            types[token] = CONTROL
        return types

    @cached_property
    def scores(self) -> list[Any] | None:
        """Scores, by token id; None: the file has none."""
        return self._numbers("scores", "fiu")

    def token_id(self, role: str) -> int | None:
        """Return the token id of a role ("bos"), or None."""
        key = f"{role}_token_id"
        if key not in self.entries:
            return None
        token = self.entries.integer(key, minimum=0)
        return token if token < len(self.tokens) else None

    @cached_property
    def end_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer; the token that the file names comes first."""
        named = [self.token_id(role) for role in ("eos", "eot", "eom")]
        known = [index for index, text in enumerate(self.tokens) if text in _ENDS]
        ends = dict.fromkeys(token for token in (*named, *known) if token is not None)
        if set(harmony.MARKS).issubset(self.tokens):  # harmony: it ends a message, not the answer
            ends.pop(self.tokens.index(harmony.END), None)
        return tuple(ends)

    def _texts(self, key: str) -> list[str]:
        texts = self.entries.raw(key)
        if not isinstance(texts, StringArray):
            raise ModelError(f"{self.path} has no {_PREFIX}{key}: choose another file of this model.")
        return texts.texts()

    def _numbers(self, key: str, kinds: str) -> list[Any] | None:
        """Return a number per token; `kinds`: allowed kinds of NumPy dtypes. None if the file has none."""
        numbers = self.entries.raw(key)
        if numbers is None:
            return None
        is_whole = isinstance(numbers, NumberArray) and len(numbers) == len(self.tokens)
        if not is_whole or numbers.data.dtype.kind not in kinds:
            raise ModelError(f"{self.path} has no {_PREFIX}{key} for each token: download it again.")
        return list(numbers.data.tolist())
