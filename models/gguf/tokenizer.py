"""A tokenizer from the vocabulary of a GGUF file; it gives the same ids as llama.cpp."""

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from neo_desktop.models.gguf.pre_tokenizers import BEGIN_WITH_BOS, PRE_TOKENIZERS, WHOLE_WORDS, pre_tokenizer
from neo_desktop.models.gguf.vocabulary import BYTE, CONTROL, UNKNOWN, USER_DEFINED, Vocabulary
from neo_desktop.models.json_file import ModelError, UnsupportedModelError
from neo_desktop.models.tokenizer import Tokenizer, choose_templates

MAX_PIECE = 512  # characters of a token in a vocabulary with scores; SentencePiece's limit is 16
_ROLES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}


def make_tokenizer(vocabulary: Vocabulary) -> Tokenizer:
    """Build the tokenizer. Raise ModelError for an unknown kind of vocabulary and for a damaged one."""
    check_kind(vocabulary)
    make = {"llama": _sentence_piece, "gemma4": _lines}.get(vocabulary.model, _byte_level)
    backend = make(vocabulary)
    _add_special_tokens(backend, vocabulary)
    roles = {role: vocabulary.token_id(key) for key, role in _ROLES.items()}
    special_tokens = {role: vocabulary.tokens[token] for role, token in roles.items() if token is not None}
    return Tokenizer(backend, special_tokens, *choose_templates(vocabulary.templates))


def check_kind(vocabulary: Vocabulary) -> None:
    """Raise ModelError for an unknown kind of vocabulary."""
    if vocabulary.model not in ("gpt2", "llama", "gemma4"):
        raise UnsupportedModelError(
            f"{vocabulary.path} has a tokenizer of the kind {vocabulary.model[:40]!r}, which is not "
            "supported: 'gpt2', 'llama' and 'gemma4' are."
        )
    if vocabulary.model == "gpt2" and vocabulary.pre not in PRE_TOKENIZERS:
        raise UnsupportedModelError(
            f"{vocabulary.path} has the pre-tokenizer {vocabulary.pre[:40]!r}, which is not supported: "
            f"{', '.join(PRE_TOKENIZERS)} are."
        )


def _byte_level(vocabulary: Vocabulary) -> tokenizers.Tokenizer:
    """Build GPT-2's kind: split a text into words, then merge bytes in a word, in the order of the merges."""
    pre = vocabulary.pre
    backend = _backend(vocabulary, _merges(vocabulary), ignore_merges=pre in WHOLE_WORDS)
    backend.pre_tokenizer = pre_tokenizer(pre)
    backend.decoder = decoders.ByteLevel()
    _add_ends(backend, vocabulary, begins=pre in BEGIN_WITH_BOS)
    return backend


def _lines(vocabulary: Vocabulary) -> tokenizers.Tokenizer:
    """Build Gemma 4's kind: merge characters in a line, or in a run of line ends, in the order of the merges.

    Text outside the vocabulary becomes byte tokens. Spaces are ordinary characters, "▁".
    """
    backend = _backend(vocabulary, _merges(vocabulary), byte_fallback=True, ignore_merges=True)
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("\n+"), "isolated")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    _add_ends(backend, vocabulary, begins=True)
    return backend


def _merges(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    return [(merge[:cut], merge[cut + 1 :]) for merge in vocabulary.merges if (cut := merge.find(" ", 1)) > 0]


def _sentence_piece(vocabulary: Vocabulary) -> tokenizers.Tokenizer:
    """Build Llama's kind: merge characters while the result is a token, the best score first.

    Text outside the vocabulary becomes byte tokens. Spaces are ordinary characters, "▁".
    """
    unknown = vocabulary.token_id("unknown")
    backend = _backend(
        vocabulary,
        _merges_by_score(vocabulary),
        byte_fallback=True,
        unk_token=None if unknown is None else vocabulary.tokens[unknown],
    )
    spaces = normalizers.Replace(" ", "▁")
    decoding = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocabulary.entries.boolean("add_space_prefix", True):
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
        decoding.append(decoders.Strip(" ", 1, 0))
    else:
        backend.normalizer = spaces
    backend.decoder = decoders.Sequence(decoding)
    _add_ends(backend, vocabulary, begins=True)
    return backend


def _merges_by_score(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Return all pairs of tokens whose concatenation is a token, sorted by its score, best first."""
    scores = vocabulary.scores
    if scores is None:
        raise ModelError(f"{vocabulary.path} has no scores of its tokens: choose another file of this model.")
    known = {
        token
        for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True)
        if kind not in (BYTE, CONTROL, UNKNOWN)
    }
    longest = max(map(len, known), default=0)
    if longest > MAX_PIECE:
        raise ModelError(f"{vocabulary.path} has a token of {longest} characters: download it again.")
    by_score = sorted(zip(scores, vocabulary.tokens, strict=True), key=lambda pair: -pair[0])
    return [
        (token[:cut], token[cut:])
        for _, token in by_score
        if token in known
        for cut in range(1, len(token))
        if token[:cut] in known and token[cut:] in known
    ]


def _backend(
    vocabulary: Vocabulary, merges: list[tuple[str, str]], **options: object
) -> tokenizers.Tokenizer:
    ids = {token: index for index, token in enumerate(vocabulary.tokens)}
    try:
        return tokenizers.Tokenizer(models.BPE(vocab=ids, merges=merges, fuse_unk=False, **options))
    except Exception as error:  # the library raises nothing narrower
        reason = str(error)[:300]
        raise ModelError(
            f"{vocabulary.path} has an invalid vocabulary ({reason}): download it again."
        ) from None


def _add_special_tokens(backend: tokenizers.Tokenizer, vocabulary: Vocabulary) -> None:
    """Add control tokens and user-defined tokens, which match before the pre-tokenizer splits a text."""
    kinds = zip(vocabulary.tokens, vocabulary.types, strict=True)
    backend.add_tokens(
        [
            AddedToken(token, special=kind != USER_DEFINED, normalized=False)
            for token, kind in kinds
            if kind in (CONTROL, UNKNOWN, USER_DEFINED)
        ]
    )


def _add_ends(backend: tokenizers.Tokenizer, vocabulary: Vocabulary, *, begins: bool) -> None:
    """Add BOS and EOS around a text if the file or its kind of vocabulary asks for them."""
    template, ends = ["$A"], []
    for role, default in (("bos", begins), ("eos", False)):
        token = vocabulary.token_id(role)
        if token is not None and vocabulary.entries.boolean(f"add_{role}_token", default):
            template.insert(0 if role == "bos" else len(template), role)
            ends.append({"id": role, "ids": [token], "tokens": [vocabulary.tokens[token]]})
    if ends:
        backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=ends)
