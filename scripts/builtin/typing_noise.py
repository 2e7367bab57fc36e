"""How people type: hurried case and punctuation, politeness, and slips of the fingers."""

from random import Random

from scripts.builtin.topics.chatter import PREFIX, SUFFIX
from scripts.builtin.topics.patterns import expand
from scripts.builtin.topics.synonyms import reworded

# The keys beside each key.
NEIGHBOURS = {
    "a": "sq", "b": "vn", "c": "xv", "d": "sf", "e": "wr", "f": "dg", "g": "fh", "h": "gj", "i": "uo",
    "j": "hk", "k": "jl", "l": "k", "m": "n", "n": "bm", "o": "ip", "p": "o", "q": "w", "r": "et", "s": "ad",
    "t": "ry", "u": "yi", "v": "cb", "w": "qe", "x": "zc", "y": "tu", "z": "x",
}  # fmt: skip


def typo(rng: Random, word: str) -> str:
    """Return the word with one slip of the fingers."""
    i = rng.randrange(1, len(word) - 1)
    kind = rng.randrange(4)
    if kind == 0:
        return word[:i] + word[i + 1] + word[i] + word[i + 2 :]
    if kind == 1:
        return word[:i] + word[i + 1 :]
    if kind == 2:
        return word[:i] + word[i] + word[i:]
    neighbours = NEIGHBOURS.get(word[i].lower())
    return word[:i] + rng.choice(neighbours) + word[i + 1 :] if neighbours else word


def with_typos(rng: Random, text: str) -> str:
    """Return the text with a slip in one or two of its longer words."""
    words = text.split(" ")
    long_words = [i for i, word in enumerate(words) if len(word) >= 4 and word.isalpha()]
    for i in rng.sample(long_words, min(len(long_words), 1 if rng.random() < 0.8 else 2)):
        words[i] = typo(rng, words[i])
    return " ".join(words)


def as_typed(rng: Random, text: str, words_only: bool = True) -> str:
    """Return the question as a hurried person may type it: case, punctuation, politeness, slips."""
    if words_only and rng.random() < 0.5:
        text = reworded(rng, text)
    if words_only and rng.random() < 0.13:
        text = with_typos(rng, text)
    if rng.random() < 0.2:
        text = text.replace("'", "")
    if words_only and rng.random() < 0.03 and text[-1].isalpha():
        text += text[-1] * rng.randint(1, 4)
    if rng.random() < 0.1:
        text = f"{expand(rng, PREFIX)} {text}"
    if words_only and rng.random() < 0.06:
        text = f"{text} {expand(rng, SUFFIX)}"
    case = rng.random()
    if case < 0.45:
        text = text.lower()
    elif case < 0.85:
        text = text[:1].upper() + text[1:]
    elif case < 0.88:
        text = text.upper()
    if text[-1].isalnum():
        text += rng.choice(("", "", "", "", "?", "?", "?", "?", "?", ".", "!", "??", " ?"))
    return text
