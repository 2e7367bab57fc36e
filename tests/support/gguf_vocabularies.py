# ruff: noqa: RUF001, E501
"""Vocabularies with tokens across words, so every cut between words shows in the ids; and test texts."""

from collections import Counter
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
from gguf_files import ALPHABET

TEXTS = (
    "",
    " ",
    "Hello, world! It's the cat's 3rd day; they'd've LEFT, WE'LL see, I'M, you'Re.",
    "The quick brown fox jumps over the lazy dog.  Two spaces.   Three.\tA tab.\t\tTwo tabs. \n A line \n\n two\n\n\n",
    "Zeilen\r\nmit\r\nWagenrücklauf\r\n\r\nund  \r\n  Leerzeichen am Ende   ",
    "Größe, Übermut, naïve façade, Żółć, ĳ, ǅ, ﬁ, ß, ẞ, İstanbul, Ångström",
    "1 22 333 4444 55555 1234567890 3.14159 1,000,000 ½ ² ③ Ⅷ ٣٤٥ ४५६ 一二三",
    "def f(x: int) -> dict[str, float]:\n    return {'a': x ** 2, \"b\": x // 3}  # done\n\n\nclass FooBar(Base):\n\tpass",
    "for (int i = 0; i < n; ++i) { a[i] = b->c[i] & 0xFF; } /* ... */ // end\n#include <stdio.h>",
    "SELECT * FROM t WHERE a='x' AND b<>\"y\"; $ ls -la | grep -v '^d' > /tmp/out && echo $? ~/.bashrc",
    "Привет, мир! Съешь ещё этих мягких французских булок, да выпей чаю. ЁЖИК's",
    "Γειά σου Κόσμε! Ξεσκεπάζω την ψυχοφθόρα βδελυγμία.",
    "你好，世界！我能吞下玻璃而不伤身体。第３章“引号”——完。",
    "こんにちは世界。私はガラスを食べられます。それは私を傷つけません。ｶﾀｶﾅ ー ゛",
    "안녕하세요 세계! 나는 유리를 먹을 수 있어요. 그래도 아프지 않아요",
    "مرحبا بالعالم، أنا قادر على أكل الزجاج؟ لا يؤلمني؛",
    "שלום עולם, אני יכול לאכול זכוכית וזה לא מזיק לי. שָׁלוֹם",
    "नमस्ते दुनिया। मैं काँच खा सकता हूँ, मुझे उस से कोई पीडा नहीं होती।",
    "สวัสดีชาวโลก ฉันกินกระจกได้ แต่มันไม่ทำให้ฉันเจ็บ",
    "வணக்கம் உலகம் বাংলা తెలుగు ქართული հայերեն አማርኛ ខ្មែរ မြန်မာ བོད་",
    "Tiếng Việt: Tôi có thể ăn thủy tinh mà không hại gì. e\u0301 decomposed, ợ o\u031b\u0323",
    "🙂👍🏽 👩‍👩‍👧‍👦 🇩🇪🏴‍☠️ ❤️ ☃ ✈️ 🏳️‍🌈1️⃣ 𝕳𝖊𝖑𝖑𝖔 𠜎𠜱",
    "a\u00a0b\u2003c\u3000d\u200be\u2028f\u2029g\u0085h\ufeffi\u00adj\x0bk\x0cl\x1cmn\x7fo",
    "zero\x00byte",
    "<|user|>Hi there<|end|>\n<|assistant|> <|end|><|end|>x <|end|> y<|en d|> <|user|",
    "...!!! ??? -- --- ___ === >>> <<< ::: ''' ``` \"\"\" (a) [b] {c} @#%^&*~ €£¥ §¶•…‘quoted’ “too” «fr» ×÷",
    "camelCaseHTTPServer snake_case_name SCREAMING kebab-case x1y2z3 ABCdef ÉCOLEécole ǄǆǅŁódź",
    "http://example.com/path?query=1&b=%20#frag user@example.org 192.168.0.1:8080 C:\\Users\\me",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa bbbbbbbb        cccc                                d",
    "\\frac{a}{b} + \\sum_{i=0}^{n} x_i^2 \\leq \\infty, ∀x∈ℝ: ∃y → √2 ≠ ½π ∫₀¹",
    "<html lang='en'>\n  <body>\n    <p>Text &amp; more</p>\n  </body>\n</html>\n",
)
SPECIAL = ("<|end|>", "<|user|>", "<|assistant|>")
_SPACE = "▁"
_LEARNT = [text for text in TEXTS if SPECIAL[0] not in text and "\0" not in text]


def byte_level(pre: str, **changes: Any) -> dict[str, Any]:
    """Return a vocabulary of bytes and of frequent text pieces, at any boundaries."""
    merges = _byte_merges()
    tokens = list(dict.fromkeys([*ALPHABET, *(left + right for left, right in merges)]))
    entries = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*tokens, *SPECIAL],
        "tokenizer.ggml.token_type": [1] * len(tokens) + [3, 3, 4],
        "tokenizer.ggml.merges": [f"{left} {right}" for left, right in merges],
        "tokenizer.ggml.bos_token_id": len(tokens) + 1,
        "tokenizer.ggml.eos_token_id": len(tokens),
    }
    return entries | changes


def sentence_piece(**changes: Any) -> dict[str, Any]:
    """Return a vocabulary of characters and frequent pieces with scores, and bytes for unknown characters."""
    words = [list(_SPACE + text.replace(" ", _SPACE)) for text in _LEARNT]
    merges = _piece_merges()
    common = Counter(char for word in words for char in word)
    merged = {char for pair in merges for char in "".join(pair)}
    chars = [char for char, count in common.most_common() if count > 2 or char in merged]
    pieces = list(dict.fromkeys([*(left + right for left, right in merges), *chars]))
    size = len(pieces)
    entries = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [
            "<unk>",
            "<s>",
            "</s>",
            *(f"<0x{byte:02X}>" for byte in range(256)),
            *pieces,
            *SPECIAL,
        ],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * size + [3, 3, 4],
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(rank) for rank in range(size)] + [0.0] * 3,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return entries | changes


def gemma_4(**changes: Any) -> dict[str, Any]:
    """Return a vocabulary of Gemma 4's kind: characters, pieces by merges, and bytes."""
    words = [list(line.replace(" ", _SPACE)) for text in _LEARNT for line in text.split("\n")]
    words += [list("\n" * count) for count in (2, 2, 2, 3)]
    merges = _merges(words, 400)
    chars = sorted({char for word in words for char in word})
    pieces = list(dict.fromkeys([*(left + right for left, right in merges), *chars]))
    ends = ["<pad>", "<eos>", "<bos>", "<unk>"]
    entries = {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": [*ends, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, *SPECIAL],
        "tokenizer.ggml.token_type": [3] * 4 + [6] * 256 + [1] * len(pieces) + [3, 3, 4],
        "tokenizer.ggml.merges": [f"{left} {right}" for left, right in merges],
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 3,
    }
    return entries | changes


def write_vocabulary(path: Path, entries: dict[str, Any]) -> Path:
    """Write a GGUF file without weights."""
    writer = gguf.GGUFWriter(None, "llama")
    for key, value in entries.items():
        match value:
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case str():
                writer.add_string(key, value)
            case _:
                writer.add_array(key, value)
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@cache
def _byte_merges() -> list[tuple[str, str]]:
    letters = dict(zip(_ordered_bytes(), ALPHABET, strict=True))
    return _merges([[letters[byte] for byte in text.encode()] for text in _LEARNT], 700)


@cache
def _piece_merges() -> list[tuple[str, str]]:
    return _merges([list(_SPACE + text.replace(" ", _SPACE)) for text in _LEARNT], 500)


def _ordered_bytes() -> list[int]:
    """Return the bytes that the alphabet's characters represent."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return [*printable, *(byte for byte in range(256) if byte not in printable)]


def _merges(words: list[list[str]], count: int) -> list[tuple[str, str]]:
    """Return the byte-pair merges: repeatedly merge the most frequent neighbors."""
    found = []
    for _ in range(count):
        pairs = Counter(pair for word in words for pair in pairwise(word))
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        found.append(best)
        words = [_merged(word, best) for word in words]
    return found


def _merged(word: list[str], pair: tuple[str, str]) -> list[str]:
    merged: list[str] = []
    for part in word:
        if merged and (merged[-1], part) == pair:
            merged[-1] += part
        else:
            merged.append(part)
    return merged
