"""Pre-tokenizers of byte-level vocabularies, by `tokenizer.ggml.pre`: the split of a text into words.

Patterns apply in order. Each splits the pieces that the patterns before it have made.
"""

from tokenizers import Regex, pre_tokenizers

_CONTRACTIONS = "'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED = (  # a capital starts a word: "fooBar" is two
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
)


def _llama3(digits: str, letters: str = r"\p{L}") -> str:
    words = rf"[^\r\n\p{{L}}\p{{N}}]?[{letters}]+|{digits}| ?[^\s{letters}\p{{N}}]+[\r\n]*"
    return f"{_CONTRACTIONS}|{words}|{_SPACES}"


def _cased(contractions: str, digits: str) -> str:
    words = "|".join(case + contractions for case in _CASED)
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"


_DEEPSEEK_3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)
_PATTERNS = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "llama-bpe": (_llama3(r"\p{N}{1,3}"),),
    "qwen2": (_llama3(r"\p{N}"),),
    "qwen35": (_llama3(r"\p{N}", r"\p{L}\p{M}"),),
    "tekken": (_cased("", r"\p{N}"),),
    "gpt-4o": (_cased(f"(?:{_CONTRACTIONS})?", r"\p{N}{1,3}"),),
    "deepseek-coder": ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"),
    "deepseek-v3": (r"\p{N}{1,3}", "[一-龥\u3040-\u30ff]+", _DEEPSEEK_3),
}
_SAME = {
    name: pattern
    for pattern, names in {
        "llama-bpe": "llama3 llama-v3 falcon3 falcon-h1 lfm2 pixtral smaug-bpe dbrx glm4",
        "qwen2": "megrez deepseek-r1-qwen stablelm2",
        "smollm": "starcoder refact command-r codeshell minerva-7b",
        "gpt-2": "phi-2 gigachat mellum olmo mpt exaone4",
        "gpt-4o": "llama4",
    }.items()
    for name in names.split()
}
PRE_TOKENIZERS = (*_PATTERNS, *_SAME)
"""Supported names."""

# Texts start with the BOS token unless the file says otherwise.
BEGIN_WITH_BOS = frozenset(
    ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "lfm2", "pixtral", "tekken")
)
# A word that is a token of the vocabulary skips the merges.
WHOLE_WORDS = BEGIN_WITH_BOS | {"glm4"}


def pre_tokenizer(name: str) -> pre_tokenizers.PreTokenizer:
    """Return the pre-tokenizer of a name. Raise KeyError if it is unknown."""
    patterns = _PATTERNS[_SAME.get(name, name)]
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    return pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
