"""Text to token ids and back, from a checkpoint's tokenizer.json."""

from collections.abc import Collection, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from neo_desktop.models import harmony
from neo_desktop.models.chat_backend import ChatBackends
from neo_desktop.models.harmony import CLOSING, OPENING, HarmonyStream
from neo_desktop.models.json_file import JsonFile, ModelError, check_size, read_text
from neo_desktop.models.marks import ChatText, Marks

MAX_TOKENIZER_BYTES = 128 << 20  # of tokenizer.json; the largest vocabularies need 35 MB
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # what an incomplete UTF-8 sequence decodes to
_HALF = "The text holds half of a surrogate pair, which is not a character: remove it."
_MAX_HELD_TOKENS = 64  # a longer run of broken bytes is passed on, not held forever
_THOUGHTS = frozenset((OPENING, CLOSING))
_SPOKEN = _THOUGHTS | {
    "<tool_call>",
    "</tool_call>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
}
TOOL_USE = "tool_use"  # name of the template for chats with tools


class Tokenizer:
    """The tokenizer of a checkpoint, with the data for chat templates.

    `special_tokens` maps roles to texts ("bos_token" -> "<s>"). `chat_template` is Jinja source, or None;
    `tool_template` is the template for chats with tools, None if it is the same.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: dict[str, str],
        chat_template: str | None = None,
        tool_template: str | None = None,
    ) -> None:
        self._backend = backend
        self._backend.no_padding()
        self._backend.no_truncation()
        self.special_tokens = special_tokens
        self.chat_template = chat_template
        self.tool_template = tool_template
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self._added: dict[int, AddedToken] = backend.get_added_tokens_decoder()
        special = {token_id: token.content for token_id, token in self._added.items() if token.special}
        self._harmony = harmony.special_of(special)
        self._texts_alone: dict[int, str | None] = {}  # cache: every generated token is looked up
        self._byte_level = b'"ByteLevel"' in backend.decoder.__getstate__() if backend.decoder else False

    @classmethod
    def from_pretrained(cls, path: Path) -> "Tokenizer":
        """Read tokenizer.json, tokenizer_config.json and the chat template of a Hugging Face folder.

        Raises ModelError if tokenizer.json is missing or damaged.
        """
        file = path / "tokenizer.json"
        if not file.exists():
            raise ModelError(
                f"{path} has no tokenizer.json: download it, or make it from tokenizer.model with "
                "`AutoTokenizer.from_pretrained(...).save_pretrained(...)` of transformers."
            )
        check_size(file, MAX_TOKENIZER_BYTES)
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises nothing narrower
            raise ModelError(f"{file} is not a valid tokenizer ({error}): download it again.") from None
        config = _tokenizer_config(path)
        special_tokens = _special_tokens(config)
        _mark_special(backend, special_tokens)
        return cls(backend, special_tokens, *choose_templates(_chat_templates(path, config)))

    @property
    def bos_token_id(self) -> int | None:
        return self._role_id("bos_token")

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokenizer's end-of-text token; the model's configuration may name more."""
        token_id = self._role_id("eos_token")
        return () if token_id is None else (token_id,)

    @property
    def special_token_ids(self) -> tuple[int, ...]:
        """Tokens without text; `decode` omits them."""
        return tuple(token_id for token_id, token in self._added.items() if token.special)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`; it may contain special tokens by their text.

        Raises ValueError for a lone surrogate, which Python and JSON permit but no vocabulary contains.
        """
        try:
            # encode() holds the GIL, for a book for seconds; encode_batch() releases it.
            return list(self._backend.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids)
        except TypeError:
            raise ValueError(_HALF) from None

    @cached_property
    def marks(self) -> Marks:
        """The texts that become control tokens if the chat template writes them, and only then.

        All special tokens are marks. Ordinary tokens like `<think>` are marks if the chat template names
        them, or if they are known to mark reasoning or calls.
        """
        control, spoken = self._control_texts()
        return Marks(control, spoken)

    def _control_texts(self) -> tuple[list[str], list[str]]:
        special = [token.content for token in self._added.values() if token.special]
        ordinary = [token.content for token in self._added.values() if not token.special]
        return control_texts(special, ordinary, f"{self.chat_template}{self.tool_template}")

    def encode_chat(self, chat: ChatText) -> list[int]:
        """Return the token ids of a chat: its marks become control tokens, text that looks like a mark stays
        text.

        BOS comes first if the tokenizer puts it before texts. Raises ValueError as `encode` does.
        """
        token_ids = self._encode_chat(chat)
        start = self.encode("")[:1]
        has_start = not start or start[0] != self.bos_token_id or token_ids[:1] == start
        return token_ids if has_start else start + token_ids

    def _encode_chat(self, chat: ChatText) -> list[int]:
        try:
            return self._chat_backends.encode(chat)
        except TypeError:
            raise ValueError(_HALF) from None

    @cached_property
    def _chat_backends(self) -> ChatBackends:
        return ChatBackends(self._backend, self.marks.texts, unknown=self.special_tokens.get("unk_token"))

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_chat_backends"}

    def chat_template_for(self, *, has_tools: bool) -> str | None:
        """Return the template of a chat; None if the model has none."""
        return self.tool_template or self.chat_template if has_tools else self.chat_template

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        """Return the text of `token_ids`; ids outside the vocabulary have no text."""
        return self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def decode_stream(self, *, is_chat: bool = False) -> "DecodeStream | HarmonyStream":
        """Return a new stream that detokenises ids one by one.

        Args:
            is_chat: sign the marks of thoughts if they are not text (see `HarmonyStream`).
        """
        stream = DecodeStream(self)
        return stream if self._harmony is None else HarmonyStream(stream, self._harmony, is_signed=is_chat)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token, possibly part of a character; empty outside the vocabulary."""
        if token_id in self._added:
            return self._added[token_id].content.encode()
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_level:
            return b"".join(_BYTE_OF.get(char, char.encode()) for char in token)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes.fromhex(token[3:5])
        return token.replace("▁", " ").encode()

    def token_text(self, token_id: int) -> str:
        """Return one token as text; bytes that form no whole character appear as U+FFFD."""
        return self.token_bytes(token_id).decode(errors="replace")

    def text_alone(self, token_id: int) -> str | None:
        """Return `decode` of one token; None for a special token and outside the vocabulary."""
        if token_id not in self._texts_alone:
            self._texts_alone[token_id] = self.decode([token_id]) if self._has_text(token_id) else None
        return self._texts_alone[token_id]

    def _has_text(self, token_id: int) -> bool:
        if token_id in self._added:
            return not self._added[token_id].special
        return self._backend.id_to_token(token_id) is not None

    def difference(self, other: "Tokenizer") -> str | None:
        """Return an id with different texts in two vocabularies, as part of a sentence; None: there is none.

        An id that only one vocabulary has is no difference: models have different numbers of unused ids.
        """
        own, its = (each._backend.get_vocab(with_added_tokens=True) for each in (self, other))
        its_texts = {token_id: text for text, token_id in its.items()}
        for text, token_id in own.items():
            if its_texts.get(token_id, text) != text:
                return f"token {token_id} is {text!r} in one and {its_texts[token_id]!r} in the other"
        return None

    def _role_id(self, role: str) -> int | None:
        token = self.special_tokens.get(role)
        return None if token is None else self._backend.token_to_id(token)


class ByteTokenizer(Tokenizer):
    """One token per UTF-8 byte, with the byte's value as its id, and 256 for the end; needs no files."""

    def __init__(self) -> None:
        backend = tokenizers.Tokenizer(models.BPE(vocab={c: b[0] for c, b in _BYTE_OF.items()}, merges=[]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens([AddedToken("<|end|>", special=True)])
        super().__init__(backend, {"eos_token": "<|end|>"})


class DecodeStream:
    """Text of a growing sequence; a piece is returned as soon as no later token can change it.

    A piece is held back while it ends inside a character. Special tokens give no text. The pieces and `flush`
    together equal `decode` of the sequence, with one exception: if a byte-fallback vocabulary leaves a
    character incomplete, `decode` also replaces the whole characters before it, and the stream keeps them.

    The library's `decoders.DecodeStream` gives the same pieces, 1 µs per token faster. But it drops the bytes
    of an unfinished character, waits for its end without limit, and fails if bytes of a byte-fallback
    vocabulary form no character.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # Decoding starts one piece back: a token's text depends on its left neighbour (spaces, bytes).
        self._token_ids: list[int] = []
        self._num_given_tokens = 0
        self._given_text = ""

    def step(self, token_id: int) -> str:
        """Add a token; return the text that is complete now, often one word, possibly empty."""
        alone = self._tokenizer.text_alone(token_id)
        if alone is None:
            return ""
        self._token_ids.append(token_id)
        text = self._tokenizer.decode(self._token_ids)
        num_held_tokens = len(self._token_ids) - self._num_given_tokens
        if text.endswith(_REPLACEMENT) and num_held_tokens < _MAX_HELD_TOKENS:
            return ""
        piece = text[len(self._given_text) :]
        del self._token_ids[: self._num_given_tokens]
        self._num_given_tokens = len(self._token_ids)
        self._given_text = alone if num_held_tokens == 1 else self._tokenizer.decode(self._token_ids)
        return piece

    def flush(self) -> str:
        """Return the held-back text; call once after the last token."""
        piece = self._tokenizer.decode(self._token_ids)[len(self._given_text) :]
        self._token_ids, self._num_given_tokens, self._given_text = [], 0, ""
        return piece


def _byte_alphabet() -> dict[str, bytes]:
    """Return character -> byte of byte-level vocabularies (GPT-2); printable bytes map to themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): bytes([byte]) for byte in printable}
    return alphabet | {chr(256 + index): bytes([byte]) for index, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _tokenizer_config(path: Path) -> JsonFile:
    """Read tokenizer_config.json; an older special_tokens_map.json adds the roles that it lacks."""
    values: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (path / name).exists():
            values |= JsonFile.read(path / name).values
    return JsonFile(path / "tokenizer_config.json", values)


def _special_tokens(config: JsonFile) -> dict[str, str]:
    """Return entries like "eos_token": either text or {"content": text}."""
    texts = {}
    for role, value in config.values.items():
        text = value.get("content") if isinstance(value, dict) else value
        if role.endswith("_token") and isinstance(text, str):
            texts[role] = text
    return texts


def _mark_special(backend: tokenizers.Tokenizer, special_tokens: dict[str, str]) -> None:
    """Make texts with a role special tokens, even if tokenizer.json lists them as ordinary ones."""
    marked = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    texts = {text for text in special_tokens.values() if backend.token_to_id(text) is not None} - marked
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in sorted(texts)])


def _chat_templates(path: Path, config: JsonFile) -> dict[str, object]:
    """Return template name → source."""
    template = config.raw("chat_template")
    if isinstance(template, list):
        named = {
            str(entry.get("name")): entry.get("template") for entry in template if isinstance(entry, dict)
        }
    else:
        named = {} if template is None else {"default": template}
    if (path / "chat_template.jinja").exists():
        named = {"default": read_text(path / "chat_template.jinja")}
        more = sorted((path / "additional_chat_templates").glob("*.jinja"))
        named |= {file.stem: read_text(file) for file in more}
    if any(not isinstance(source, str) for source in named.values()):
        raise ModelError(f"{config.path} has a chat_template that is not text: download it again.")
    return named


def choose_templates(named: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Return the templates for chats, and for chats with tools.

    Without a template named "default", the first one is used.
    """
    default = named.get("default", next(iter(named.values()), None))
    return default, named.get(TOOL_USE)


def control_texts(
    special: Collection[str], ordinary: Collection[str], templates: str
) -> tuple[list[str], list[str]]:
    """Return the texts that are marks in chats, and the marks that an assistant's own text may contain."""
    named = [text for text in ordinary if _is_bracketed(text) and text in templates]
    return [*special, *named], [*_SPOKEN.intersection(ordinary), *_THOUGHTS.intersection(special)]


def _is_bracketed(text: str) -> bool:
    return f"{text[0]}{text[-1]}" in ("<>", "[]", "◁▷")
