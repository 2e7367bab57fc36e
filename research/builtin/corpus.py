"""Write the built-in model's corpus: short chats about neo-desktop, with noise, from seeded templates.

python -m research.builtin.corpus --chats 20        # print 20 chats
"""

import argparse
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from research.builtin.topics import ALL_TOPICS, DEFINITION_PATTERNS, Topic
from research.builtin.topics.arithmetic import draw as draw_arithmetic
from research.builtin.topics.beyond import draw_beyond, draw_unclear
from research.builtin.topics.chatter import AGAIN, MORE, NOTHING_MORE, SUGGESTION, SYSTEM_PROMPTS
from research.builtin.topics.patterns import expand
from research.builtin.typing_noise import as_typed

SEED = 20
QUESTIONS = 320_000
CHATS = 30_000

# Shares of questions in chats. The rest concerns the world at large, or nothing.
TOPICS_SHARE = 0.53
SUMS_SHARE = 0.25
BEYOND_SHARE = 0.19
DRILLED_SUMS_SHARE = 0.3  # of single questions: sums take longest to learn

NAMED_SHARE = 0.65
SYSTEM_SHARE = 0.12


@dataclass(frozen=True)
class Message:
    """One message of a chat; the role is system, user, assistant, or text for a passage outside any chat."""

    role: str
    content: str


Conversation = tuple[Message, ...]


def normalised(text: str) -> str:
    """Return the text as words and signs alone, to compare questions."""
    return " ".join(re.findall(r"[a-z0-9.,]*[a-z0-9]|[+*/\u00d7\u00f7=-]", text.lower().replace("'", "")))


def draw_topic(rng: Random) -> tuple[str, str, Topic]:
    """Return a question about one topic, one of its answers, and the topic."""
    topic = rng.choices(ALL_TOPICS, TOPIC_WEIGHTS)[0]
    if topic.names and (not topic.questions or rng.random() < NAMED_SHARE):
        name = expand(rng, rng.choice(topic.names))
        question = expand(rng, rng.choice(DEFINITION_PATTERNS)).replace("@", name)
    else:
        question = expand(rng, rng.choice(topic.questions))
    return question, rng.choice(topic.answers), topic


# A topic with many wordings needs many examples.
TOPIC_WEIGHTS = tuple(
    topic.weight * math.sqrt(len(topic.questions) + (3 if topic.names else 0)) for topic in ALL_TOPICS
)


def follow_up(rng: Random, last_answer: str, more: str) -> tuple[str, str]:
    """Return a turn that only makes sense after the last answer."""
    if rng.random() < 0.25:
        return as_typed(rng, expand(rng, rng.choice(AGAIN))), last_answer
    return as_typed(rng, expand(rng, rng.choice(MORE))), more


def turn_count(rng: Random) -> int:
    """Draw the number of questions in a chat; a few chats fill the whole context."""
    share = rng.random()
    if share < 0.9:
        return rng.choice((1, 1, 1, 1, 1, 2, 2, 2, 3, 3, 4))
    return rng.randint(5, 12) if share < 0.993 else rng.randint(20, 40)


def draw_turn(rng: Random, sums_share: float = SUMS_SHARE) -> tuple[str, str, str]:
    """Return a question, its answer, and the reply to "tell me more"."""
    scale = (1 - sums_share) / (1 - SUMS_SHARE)
    topics_end = TOPICS_SHARE * scale
    sums_end = topics_end + sums_share
    kind = rng.random()
    if kind < topics_end:
        question, answer, topic = draw_topic(rng)
        return as_typed(rng, question), answer, topic.more or NOTHING_MORE
    if kind < sums_end:
        question, answer = draw_arithmetic(rng)
        return as_typed(rng, question, words_only=False), answer, NOTHING_MORE
    if kind < sums_end + BEYOND_SHARE * scale:
        question, answer = draw_beyond(rng)
        return as_typed(rng, question), answer, NOTHING_MORE
    question, answer = draw_unclear(rng)
    return question, answer, SUGGESTION


def draw_conversation(rng: Random) -> Conversation:
    """Return one chat, or sometimes a passage of plain text."""
    if rng.random() < 0.03:
        return (Message("text", " ".join(draw_topic(rng)[1] for _ in range(rng.randint(1, 3)))),)
    messages = [system_message(rng)] if rng.random() < SYSTEM_SHARE else []
    last_answer, more = SUGGESTION, SUGGESTION
    for index in range(turn_count(rng)):
        if rng.random() < (0.2 if index else 0.01):
            question, last_answer = follow_up(rng, last_answer, more)
            more = NOTHING_MORE
        else:
            question, last_answer, more = draw_turn(rng)
        messages += [Message("user", question), Message("assistant", last_answer)]
    return tuple(messages)


def chats(count: int = CHATS, seed: int = SEED) -> Iterator[Conversation]:
    """Yield whole chats of any length, equal for equal seeds."""
    rng = Random(seed)
    for _ in range(count):
        yield draw_conversation(rng)


def questions(count: int = QUESTIONS, seed: int = SEED) -> Iterator[Conversation]:
    """Yield chats of one question, equal for equal seeds."""
    rng = Random(f"questions {seed}")
    for _ in range(count):
        question, answer, _more = draw_turn(rng, DRILLED_SUMS_SHARE)
        turn = (Message("user", question), Message("assistant", answer))
        yield (system_message(rng), *turn) if rng.random() < SYSTEM_SHARE else turn


def system_message(rng: Random) -> Message:
    """Return a typical system prompt; the guide answers the same under all."""
    return Message("system", expand(rng, rng.choice(SYSTEM_PROMPTS)))


def main() -> None:
    parser = argparse.ArgumentParser(description="Print chats of the built-in model's corpus.")
    parser.add_argument("--chats", type=int, default=20)
    parser.add_argument("--seed", type=int, default=SEED)
    options = parser.parse_args()
    for conversation in chats(options.chats, options.seed):
        print("\n".join(f"{message.role:>9}: {message.content}" for message in conversation), end="\n\n")


if __name__ == "__main__":
    main()
