"""Uniqueness of keys in JSON objects, which a grammar alone cannot enforce."""

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np


class TokenIndex:
    """Tokens by their first bytes, and tokens that contain a whole key."""

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self.tokens = tokens
        order = sorted(range(len(tokens)), key=tokens.__getitem__)
        self._ids = order
        self._bytes = [tokens[token_id] for token_id in order]
        self._with_keys = np.array([i for i, token in enumerate(tokens) if token.count(b'"') > 1], np.int64)

    def beginning_with(self, start: bytes) -> Sequence[int]:
        first = bisect_left(self._bytes, start)
        last = bisect_left(self._bytes, start + b"\xff" * 4, first)
        return self._ids[first:last]

    def with_keys(self, allowed: bytes) -> list[int]:
        """Return the allowed tokens, one bit each, that contain at least two quotes."""
        bits = np.frombuffer(allowed, np.uint8)
        ids = self._with_keys[self._with_keys < 8 * len(bits)]
        tokens: list[int] = ids[bits[ids >> 3] >> (ids & 7) & 1 == 1].tolist()
        return tokens


class OpenKeys:
    """Open objects in the JSON written so far, with their keys; surrounding text is skipped."""

    def __init__(self) -> None:
        self._open: list[set[bytes] | None] = []  # None: an array
        self._key: bytes | None = None  # the part read so far
        self._expects_key = False
        self._in_string = False
        self._is_escaped = False

    def copy(self) -> "OpenKeys":
        other = OpenKeys()
        other.__dict__ |= self.__dict__
        other._open = [None if keys is None else set(keys) for keys in self._open]
        return other

    def feed(self, text: bytes) -> bool:
        """Read text; return False if a key is repeated."""
        is_unique = True
        for byte in text:
            if self._in_string:
                is_unique &= self._read(byte)
            elif byte in b"{[":
                self._open.append(set() if byte == ord("{") else None)
                self._expects_key = byte == ord("{")
            elif not self._open:
                continue
            elif byte in b"}]":
                self._open.pop()
                self._expects_key = False
            elif byte == ord(","):
                self._expects_key = self._open[-1] is not None
            elif byte == ord('"'):
                self._in_string, self._key = True, b"" if self._expects_key else None
                self._expects_key = False
        return is_unique

    def _read(self, byte: int) -> bool:
        """Read a byte of a string; return False if it completes a repeated key."""
        if byte == ord('"') and not self._is_escaped:
            self._in_string = False
            keys = self._open[-1]
            if self._key is None or keys is None:
                return True
            is_new = self._key not in keys
            keys.add(self._key)
            self._key = None
            return is_new
        self._is_escaped = byte == ord("\\") and not self._is_escaped
        if self._key is not None:
            self._key += bytes((byte,))
        return True

    def without_repeated(self, allowed: bytes, index: TokenIndex) -> bytes:
        """Return the allowed tokens, one bit each, without those that complete a repeated key.

        If none is left, return them all: a pattern may allow only a few keys.
        """
        if not self._open:
            return allowed
        repeated: list[int] = []
        if self._key is not None and (keys := self._open[-1]):
            for key in keys:
                if key.startswith(self._key):
                    repeated += index.beginning_with(key[len(self._key) :] + b'"')
        repeated += [i for i in index.with_keys(allowed) if not self.copy().feed(index.tokens[i])]
        if not repeated:
            return allowed
        kept = bytearray(allowed)
        for token_id in repeated:
            if token_id < 8 * len(kept):
                kept[token_id >> 3] &= ~(1 << (token_id & 7))
        return bytes(kept) if any(kept) else allowed
