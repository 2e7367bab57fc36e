"""The messages on the page: what was said, and the line that the page itself puts under an answer."""

import html
import re
from collections.abc import Sequence
from typing import Any

# {"role", "content": [{"type": "text", "text"}], "metadata"}, as gradio.Chatbot takes and returns them.
# Under an answer the text ends with a line of the page's own, kept as metadata["log"] too, so that it
# can be told from what the model said:
#
#   text   Paris is the capital of France.\n\n<p class="figures">first token after 0.12 s · …</p>
#   log                                       <p class="figures">first token after 0.12 s · …</p>
Message = dict[str, Any]

CODE_FENCE = re.compile(r"^ {0,3}```", re.MULTILINE)


def question(text: str) -> Message:
    """What the user said."""
    # As a part, not as a plain string: gradio strips the indentation of plain strings.
    return {"role": "user", "content": [{"type": "text", "text": text}]}


def answer(text: str, line: str, kind: str = "figures") -> Message:
    """What the model said so far, and the page's line under it; kind is figures, waiting or error."""
    return _signed(text, f'<p class="{kind}">{html.escape(" ".join(line.split()))}</p>')


def stopped(shown: Sequence[Message]) -> list[Message]:
    """The conversation after a stop, which the line under its last answer tells; also if it does already."""
    *rest, last = shown
    if "stopped " in (last.get("metadata") or {}).get("log", ""):
        return list(shown)
    if not said(last):
        return [*rest, answer("", "stopped before the first token")]
    return [*rest, _signed(said(last), last["metadata"]["log"].replace(">", ">stopped · ", 1))]


def said(message: Message) -> str:
    """The text of a message without the page's line; empty for a thought, which gradio gives a title."""
    metadata = message.get("metadata") or {}
    if metadata.get("title"):
        return ""
    text = "".join(part["text"] for part in message["content"])
    return text.removesuffix(metadata["log"]).rstrip() if "log" in metadata else text


def up_to_last_question(shown: Sequence[Message]) -> list[Message]:
    """The conversation without what was answered to its last question."""
    last = max(i for i, message in enumerate(shown) if message["role"] == "user")
    return list(shown[: last + 1])


def to_send(shown: Sequence[Message], system_prompt: str) -> list[dict[str, str]]:
    """What the model is told of the conversation, which ends with the question to answer.

    Questions that got no answer are left out, since chat templates want user and assistant to alternate.
    """
    turns: list[dict[str, str]] = []
    for message in shown:
        text = said(message)
        if not text:
            continue
        if turns and turns[-1]["role"] == "user" and message["role"] == "user":
            turns.pop()
        turns.append({"role": message["role"], "content": text})
    if system_prompt.strip():
        turns.insert(0, {"role": "system", "content": system_prompt})
    return turns


def _signed(text: str, line: str) -> Message:
    # What the answer left open would draw the line into itself.
    if len(CODE_FENCE.findall(text)) % 2:
        text += "\n```"
    if text.count("<think>") > text.count("</think>"):
        text += "\n</think>"
    content = [{"type": "text", "text": f"{text}\n\n{line}" if text else line}]
    return {"role": "assistant", "content": content, "metadata": {"log": line}}
