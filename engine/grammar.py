"""Grammars that constrain an output: llguidance computes the allowed next tokens."""

import json
import re
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from neo_desktop.engine.errors import SettingError
from neo_desktop.engine.grammar_keys import OpenKeys, TokenIndex
from neo_desktop.engine.grammar_trial import GrammarTrial, limits
from neo_desktop.engine.json_schema import Enforceable, enforceable
from neo_desktop.models.tokenizer import Tokenizer

if TYPE_CHECKING:  # engines without grammars do not need llguidance
    from llguidance import LLMatcher

MAX_GRAMMAR_CHARS = 2**17
MAX_COMPILED = 16  # cached grammars; the least recently used is dropped first

_JSON = re.compile(r'"json_schema"|%json')  # in a grammar

# Between the parts of JSON; bounded, because small models tend to repeat it endlessly.
WHITE_SPACE = r" |\r?\n[ \t]{0,40}"


def _matchers() -> "type[LLMatcher]":
    try:
        from llguidance import LLMatcher
    except ModuleNotFoundError:
        raise SettingError(
            "grammar", f"needs llguidance: {sys.executable} -m pip install llguidance"
        ) from None
    return LLMatcher


def any_json() -> str:
    """Return the grammar of any JSON object."""
    return from_json_schema({"type": "object"})


def from_json_schema(schema: Mapping[str, Any] | bool | str) -> str:
    """Return the grammar of JSON that satisfies a schema, in one line or indented.

    Constraints that cannot be enforced are left out; `parsed_schema` lists them.

    Raises:
        SettingError: it is no JSON schema, is too long, or is unsupported.
    """
    return from_enforceable(parsed_schema(schema).schema)


def from_enforceable(schema: Mapping[str, Any]) -> str:
    """Return the grammar of a schema returned by `parsed_schema`."""
    return _checked(_matchers().grammar_from_json_schema(json_rule(schema, whitespace_pattern=WHITE_SPACE)))


def parsed_schema(schema: Mapping[str, Any] | bool | str, *, is_strict: bool = False) -> Enforceable:
    """Return the enforceable form of a schema; raises the errors of `from_json_schema`."""
    try:
        value = json.loads(schema) if isinstance(schema, str) else schema
    except (ValueError, RecursionError) as error:
        raise SettingError("grammar", f"needs a JSON schema: {error}") from None
    return enforceable(value, is_strict=is_strict)


def json_rule(schema: Mapping[str, Any], **spacing: Any) -> str:
    """Return the JSON text of an enforceable schema, for `%json` in Lark.

    Args:
        spacing: llguidance options; the default is Python's JSON format in one line.
    """
    options = spacing or {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    options |= {"coerce_one_of": True, "lenient": True}  # `enforceable` lists the consequences
    text = json.dumps(schema)
    # Each character then has one spelling, unless a control character must be possible.
    escapes = {} if "\\u00" in text else {"json_allowed_escapes": 'nrbtf\\"'}
    return json.dumps({**schema, "x-guidance": options | escapes})


def from_regex(pattern: str) -> str:
    """Return the grammar of texts that fully match a regular expression."""
    return _checked(_matchers().grammar_from_regex(pattern))


def from_lark(text: str) -> str:
    """Return a grammar written in llguidance's variant of Lark."""
    return _checked(_matchers().grammar_from_lark(text))


def _checked(grammar: str) -> str:
    if len(grammar) > MAX_GRAMMAR_CHARS:
        raise SettingError(
            "grammar",
            f"has {len(grammar)} characters, more than the limit of {MAX_GRAMMAR_CHARS}: make it smaller",
        )
    return grammar


class GrammarState:
    """Position of one output in its grammar.

    Args:
        matcher: at the start of the grammar; owned by this object.
        awaited: bytes that the output must contain first; the text after them follows the grammar.
        keys: of the JSON that the grammar describes; None: other text.
        on_error: called if the output cannot continue.
    """

    def __init__(
        self,
        matcher: "LLMatcher",
        awaited: bytes,
        vocabulary: "_Vocabulary",
        keys: OpenKeys | None,
        on_error: Callable[[], object],
    ) -> None:
        self._keys = keys
        self._matcher = matcher
        self._awaited = awaited
        self._vocabulary = vocabulary
        self._on_error = on_error
        self._end = b""  # end of the output, until `awaited` appears
        self.error: str | None = None

    @property
    def is_complete(self) -> bool:
        return not self._awaited and self._matcher.is_stopped()

    def allowed_tokens(self) -> bytes:
        """Return one bit per token, set if it may come next: token i is bit i % 8 of byte i // 8.

        The bits cover the model's vocabulary, rounded up to whole bytes.
        """
        if self._awaited:
            return self._vocabulary.all_but_eos
        allowed = self._matcher.compute_bitmask()[: len(self._vocabulary.all_but_eos)]
        if not self._matcher.is_error():
            keys = self._keys
            return allowed if keys is None else keys.without_repeated(allowed, self._vocabulary.index)
        # The sampler may draw any token then: `accept` will refuse it.
        self._fail()
        return b"\xff" * len(allowed)

    def accept(self, token_id: int) -> bool:
        """Advance by a token; return False if that is impossible, with the reason in `error`."""
        if self._awaited:
            text = self._end + self._vocabulary.tokens[token_id]
            self._end = text[-len(self._awaited) :]
            if self._awaited in text:
                self._awaited = b""
        elif self.error is None:
            if not self._matcher.consume_token(token_id):
                self._fail()
            elif self._keys is not None:
                self._keys.feed(self._vocabulary.tokens[token_id])
        return self.error is None

    def after(self, token_id: int) -> "GrammarState | None":
        """Return the state after one more token, this one unchanged; None: the token is not allowed."""
        keys = None if self._keys is None else self._keys.copy()
        # A failure of the copy says nothing about the output.
        copy = GrammarState(self._matcher.deep_copy(), self._awaited, self._vocabulary, keys, bool)
        copy._end, copy.error = self._end, self.error
        return copy if copy.accept(token_id) else None

    def _fail(self) -> None:
        self.error = f"grammar cannot be followed any further: {_reason(self._matcher.get_error())}"
        self._on_error()


class GrammarCompiler:
    """Compiles grammars for the tokens of one model; thread-safe.

    Compilation takes milliseconds. It runs in another thread before the request is added, so that the engine
    finds the grammar compiled.

    Args:
        vocab_size: of the model's logits.
        eos_token_ids: allowed where the grammar may end.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = [token_id for token_id in eos_token_ids if 0 <= token_id < vocab_size]
        self._vocabulary: _Vocabulary | None = None  # built on first use, which takes a while
        self._vocabulary_lock = threading.Lock()
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._compiled_lock = threading.Lock()
        self._trial = GrammarTrial()

    def close(self) -> None:
        self._trial.close()

    def compile(self, grammar: str) -> None:
        """Compile a grammar, unless it is cached; raise SettingError if it cannot be used."""
        self._matcher(grammar)

    def start(self, grammar: str, after: str | None = None) -> GrammarState:
        """Return the state of an empty output; raises the errors of `compile`.

        Args:
            after: text that the output must contain before it follows the grammar; None: it follows from the
                start.
        """
        matcher = self._matcher(grammar).deep_copy()
        keys = OpenKeys() if _JSON.search(grammar) else None
        forget = partial(self._forget, grammar)
        return GrammarState(matcher, (after or "").encode(), self._ready_vocabulary(), keys, forget)

    def _forget(self, grammar: str) -> None:
        """Drop a cached grammar: its outputs share its computed states and its limits."""
        with self._compiled_lock:
            self._compiled.pop(grammar, None)

    def _matcher(self, grammar: str) -> "LLMatcher":
        with self._compiled_lock:
            matcher = self._compiled.get(grammar)
            if matcher is not None:
                self._compiled.move_to_end(grammar)
                return matcher
        matcher = self._new_matcher(_checked(grammar))
        with self._compiled_lock:
            self._compiled[grammar] = matcher
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        return matcher

    def _new_matcher(self, grammar: str) -> "LLMatcher":
        matchers = _matchers()
        if not self._trial.is_harmless(grammar):
            raise SettingError("grammar", "cannot be used: it is too complex, make it smaller")
        matcher = matchers(self._ready_vocabulary().tokenizer, grammar, log_level=0, limits=limits())
        # The first token masks may be slow; all outputs share what this computes.
        beginning = matcher.deep_copy()
        beginning.compute_bitmask()
        for tried in (matcher, beginning):
            if tried.is_error():
                raise SettingError("grammar", f"cannot be used: {_reason(tried.get_error())}")
        return matcher

    def _ready_vocabulary(self) -> "_Vocabulary":
        with self._vocabulary_lock:
            if self._vocabulary is None:
                self._vocabulary = _Vocabulary(self._tokenizer, self._vocab_size, self._eos_token_ids)
            return self._vocabulary


class _Vocabulary:
    """A model's tokens in the form that llguidance expects.

    Tokens without text are special tokens: they appear where a grammar names them, never as their characters.
    Ids without a token are never allowed.
    """

    is_tokenizer_wrapper = True  # llguidance expects it of a tokenizer, with the next four and __call__
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._encode = tokenizer.encode
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
        if not eos_token_ids:  # an id without a logit, so that a grammar can end
            eos_token_ids = [vocab_size]
            self.tokens.append(b"")
        self.eos_token_id = eos_token_ids[0]
        special = {i for i in tokenizer.special_token_ids if i < vocab_size} | set(eos_token_ids)
        self.special_token_ids = sorted(special)
        self._special = frozenset(special)
        from llguidance import LLTokenizer

        self.tokenizer = LLTokenizer(self, eos_token=list(eos_token_ids))  # type: ignore[arg-type]
        self.index = TokenIndex(self.tokens)
        ends = set(eos_token_ids)
        is_allowed = [bool(self.tokens[i]) and i not in ends for i in range(vocab_size)]
        self.all_but_eos = np.packbits(is_allowed, bitorder="little").tobytes()

    def __call__(self, text: str) -> list[int]:
        """Return the tokens that the model expects for a text that must come next."""
        token_ids = self._encode(text, add_special_tokens=False)
        is_same = self._special.isdisjoint(token_ids) and (
            b"".join(self.tokens[token_id] for token_id in token_ids if token_id < len(self.tokens))
            == text.encode()
        )
        # Many tokenizers prepend a space to every text, and text that looks like a special token becomes one.
        return token_ids if is_same else self.tokenizer.greedy_tokenize(text)


def _reason(error: str) -> str:
    """Return llguidance's message in one line, without its state."""
    lines = [line.strip() for line in error.partition("<")[0].splitlines()]
    reason = " ".join(line for line in lines if line)[:300]
    return "no text follows it" if reason == "NoExtensionBias" else reason
