"""Tokenises chats so that no text of a message becomes a control token."""

from collections.abc import Collection, Iterator

import tokenizers
from tokenizers import AddedToken

from neo_desktop.models.limits import MAX_VOCAB_SIZE
from neo_desktop.models.marks import SIGNS, ChatText


class ChatBackends:
    """Copies of a tokenizer with a sign before each mark: a character that no text of the chat contains.

    The library cuts, normalises and merges the texts around the marks as usual, but recognises a mark only
    after its sign. The copies share the vocabulary with the original.

    Args:
        unknown: the token for text outside the vocabulary. Unlike other control tokens, texts may produce it.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, marks: Collection[str], *, unknown: str | None = None
    ) -> None:
        self._backend = backend
        self._marks = frozenset(marks)
        self._controls = {
            token_id: text
            for text in marks
            if text != unknown and (token_id := backend.model.token_to_id(text)) is not None
        }
        self._copies: dict[str, tuple[tokenizers.Tokenizer, dict[int, int]]] = {}

    def encode(self, chat: ChatText) -> list[int]:
        """Return token ids; raises TypeError for a lone surrogate."""
        texts = chat.pieces[::2]
        sign = next((sign for sign in SIGNS if not any(sign in text for text in texts)), None)
        if sign is None:
            raise ValueError("The text holds every private character of Unicode: remove them.")
        if sign not in self._copies:
            self._copies = {sign: self._copy(sign)}  # one copy: the sign rarely changes
        backend, original_ids = self._copies[sign]
        joined = "".join(sign * (number % 2) + piece for number, piece in enumerate(chat.pieces))
        token_ids = backend.encode_batch([joined], add_special_tokens=False)[0].ids
        if not self._controls.keys().isdisjoint(token_ids):
            token_ids = [one for token_id in token_ids for one in self._as_text(backend, token_id)]
        return [original_ids.get(token_id, token_id) for token_id in token_ids]

    def _as_text(self, backend: tokenizers.Tokenizer, token_id: int) -> Iterator[int]:
        """Yield the tokens of a control token's text, character by character.

        Some vocabularies turn ordinary text into control tokens even without added tokens.
        """
        text = self._controls.get(token_id)
        if text is None:
            yield token_id
            return
        for char in text:
            ids = backend.encode(char, add_special_tokens=False).ids
            yield from (one for one in ids if one not in self._controls)

    def _copy(self, sign: str) -> tuple[tokenizers.Tokenizer, dict[int, int]]:
        """Return the copy, and a map from ids of its added tokens to the original ids."""
        backend = self._backend
        copy = tokenizers.Tokenizer(backend.model)
        if backend.normalizer is not None:
            copy.normalizer = backend.normalizer
        if backend.pre_tokenizer is not None:
            copy.pre_tokenizer = backend.pre_tokenizer
        vocabulary = backend.get_vocab(with_added_tokens=False)
        # The library numbers new tokens from the vocabulary's size; fill holes in the ids first.
        num_holes = max(vocabulary.values(), default=-1) + 1 - len(vocabulary)
        if num_holes > MAX_VOCAB_SIZE:
            raise ValueError(f"The vocabulary leaves {num_holes} ids out, too many for chats.")
        fillers = (f"{sign}{number}{sign}" for number in range(num_holes))
        copy.add_tokens([AddedToken(filler, normalized=False) for filler in fillers])
        original_ids = {}
        for token_id, token in sorted(backend.get_added_tokens_decoder().items()):
            added = token
            if token.content in self._marks:
                added = AddedToken(
                    sign + token.content,
                    single_word=token.single_word,
                    lstrip=token.lstrip,
                    rstrip=token.rstrip,
                    normalized=False,  # a normaliser might remove the sign
                )
            copy.add_tokens([added])
            new_id = copy.token_to_id(added.content)
            assert new_id is not None
            original_ids[new_id] = token_id
        return copy, original_ids
