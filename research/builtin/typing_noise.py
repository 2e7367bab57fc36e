"""Typing noise: hurried case and punctuation, politeness, and typing errors."""

from random import Random

from research.builtin.topics.chatter import PREFIX, SUFFIX
from research.builtin.topics.patterns import expand
from research.builtin.topics.synonyms import reworded

# Neighbouring keys.
NEIGHBOURS = {
    "a": "sq", "b": "vn", "c": "xv", "d": "sf", "e": "wr", "f": "dg", "g": "fh", "h": "gj", "i": "uo",
    "j": "hk", "k": "jl", "l": "k", "m": "n", "n": "bm", "o": "ip", "p": "o", "q": "w", "r": "et", "s": "ad",
    "t": "ry", "u": "yi", "v": "cb", "w": "qe", "x": "zc", "y": "tu", "z": "x",
}  # fmt: skip


def typo(rng: Random, word: str) -> str:
    """Return the word with one typing error."""
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
    """Return the text with an error in one or two of its longer words."""
    words = text.split(" ")
    long_words = [i for i, word in enumerate(words) if len(word) >= 4 and word.isalpha()]
    for i in rng.sample(long_words, min(len(long_words), 1 if rng.random() < 0.8 else 2)):
        words[i] = typo(rng, words[i])
    return " ".join(words)


# Filler words in any position, which must not change the model's answer.
FILLERS = """
    actually again also always any anybody anyway apart around basically because before best better both
    briefly by call certain clear common computer could current currently day different directly during each
    easily either else end enough especially even ever every exact exactly fast few finally find first folks
    following friend further general generally give going good great guys happen having heard here honest
    honestly hope idea if important indeed instead interesting just keep kind know last later least less
    like likely little long look lot many may maybe me mean might mind moment more most much must my myself
    need never new next nice normal normally now often old once one only open opinion or other our out over
    own part people perhaps person please point possible pretty probably properly quick quickly quite rather
    read real really recently right roughly same say second see seem seems set several short should show
    side simple simply since small some somebody someone something sometimes soon sort still stuff such
    suddenly sure take talk technically tell than thing things think though thought through time today
    together too totally try trying two type under until up use used useful usually various very want wanted
    way well what when where which while who whole why will with without wonder word words work world would
    yet you your
""".split()  # noqa: SIM905 - a long list of words reads best as text
# Words that a hurried person omits.
SMALL_WORDS = frozenset(
    ("a", "an", "are", "do", "does", "for", "i", "in", "is", "it", "me", "my", "of", "the", "to", "you")
)


def with_fillers(rng: Random, text: str) -> str:
    """Return the text with a few filler words, and perhaps without others."""
    words = text.split(" ")
    if len(words) > 3:
        chance = rng.random()
        if chance < 0.2:  # telegram style
            words = [word for word in words if word.lower() not in SMALL_WORDS] or words
        elif chance < 0.5:
            small = [i for i, word in enumerate(words) if word.lower() in SMALL_WORDS]
            if small:
                del words[rng.choice(small)]
        elif chance < 0.58:
            del words[rng.randrange(len(words))]
    for _ in range(rng.choice((0, 1, 1, 1, 2, 2, 3))):
        words.insert(rng.randint(0, len(words)), rng.choice(FILLERS))
    return " ".join(words)


def as_typed(rng: Random, text: str, words_only: bool = True) -> str:
    """Return the question as a hurried person may type it: case, punctuation, politeness, errors."""
    if words_only and rng.random() < 0.5:
        text = reworded(rng, text)
    if words_only and len(text) > 3 and rng.random() < 0.25:
        text = with_fillers(rng, text)
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
