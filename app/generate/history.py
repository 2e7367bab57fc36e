"""Earlier calls of tools and their results, as the template of a model takes them."""

import json
from collections.abc import Sequence

from neo_desktop.app.generate.tools import Tool
from neo_desktop.engine.json_schema import Json


def arguments_of(text: str) -> Json | str:
    """The arguments of a call as an object; as they are where they are none. No text: no arguments."""
    try:
        arguments = json.loads(text) if text.strip() else None
    except (ValueError, RecursionError):
        return text
    return arguments if isinstance(arguments, dict) else text if arguments is not None else {}


def function_call(call_id: str, name: str, arguments: object) -> Json:
    """Return a call as OpenAI's clients and chat templates have it."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def paired(messages: Sequence[Json], *, single_calls: bool = False) -> list[Json]:
    """The same chat with results in the order of the calls that they answer.

    Results belong to the calls of the last message that has any: many servers use the same ids in each
    turn. Within it they are matched by id, without ids by order. What answers no call follows the others.

    With `single_calls`, each call is in a message of its own, before its result.
    """
    result: list[Json] = []
    for head, rest in _turns(messages):
        calls = head.get("tool_calls", ())
        if not calls:
            result += [head, *rest]
            continue
        answers, loose = _matched(calls, [message for message in rest if message["role"] == "tool"])
        pairs = list(zip(_with_distinct_ids(calls), answers, strict=True))
        for group in [[pair] for pair in pairs] if single_calls else [pairs]:
            result.append(head | {"tool_calls": [call for call, _ in group]})
            result += [answer | {"tool_call_id": call["id"]} for call, answer in group if answer]
            head = {"role": head["role"], "content": ""}  # noqa: PLW2901
        result += loose + [message for message in rest if message["role"] != "tool"]
    return result


def _turns(messages: Sequence[Json]) -> list[tuple[Json, list[Json]]]:
    """Messages, each with calls together with what follows it until the next one."""
    turns: list[tuple[Json, list[Json]]] = []
    for message in messages:
        if message.get("tool_calls") or not turns or not turns[-1][0].get("tool_calls"):
            turns.append((message, []))
        else:
            turns[-1][1].append(message)
    return turns


def _matched(calls: Sequence[Json], results: Sequence[Json]) -> tuple[list[Json | None], list[Json]]:
    """Return each call's result, and the results without a call."""
    answers: list[Json | None] = [None] * len(calls)

    def take(result: Json, *, by_id: bool) -> bool:
        given = result.get("tool_call_id") or ""
        for number, call in enumerate(calls):
            called = call.get("id") or ""
            is_same = given == called != "" if by_id else not given or not called
            if answers[number] is None and is_same:
                answers[number] = result
                return True
        return False

    unmatched = [result for result in results if not take(result, by_id=True)]
    return answers, [result for result in unmatched if not take(result, by_id=False)]


def _with_distinct_ids(calls: Sequence[Json]) -> list[Json]:
    """The calls of one message, of which some clients give several the same id or none."""
    found: list[Json] = []
    taken: set[str] = set()
    for number, call in enumerate(calls):
        call_id = call.get("id") or f"call_{number}"
        while call_id in taken:
            call_id = f"{call_id}_{number}"
        taken.add(call_id)
        found.append({**call, "id": call_id})
    return found


def with_thinking(messages: Sequence[Json]) -> list[Json]:
    """The same chat with the thoughts that led to calls where gpt-oss's template looks for them.

    It takes them only where there is no text beside the call.
    """
    return [
        message | {"thinking": message["reasoning_content"]}
        if message.get("tool_calls") and message.get("reasoning_content") and not message["content"]
        else message
        for message in messages
    ]


_EXPLANATION = """\
You can call tools. To call one, answer with its name and its arguments as JSON between these marks, and \
with nothing else:
<tool_call>
{{"name": "the tool's name", "arguments": {{"an argument": "its value"}}}}
</tool_call>
The results come back between <tool_response> marks. Without a need for a tool, answer as usual.
These are the tools, one per line:
{tools}"""


def explained(messages: Sequence[Json], tools: Sequence[Tool]) -> list[Json]:
    """The same chat for a template that knows no tools: they are explained, calls and results are text.

    The explanation stands in the system prompt or, where there is none, before the first message: some
    templates have no place for a system prompt.
    """
    result: list[Json] = []
    before = None  # the last message's role
    for message in messages:
        role, text = message["role"], message.get("content") or ""
        if role == "tool":
            role, text = "user", f"<tool_response>\n{text}\n</tool_response>"
        calls = [_call_as_text(call["function"]) for call in message.get("tool_calls", ())]
        text = "\n".join(part for part in (text, *calls) if part)
        # Some templates take no two messages of the user in a row.
        if "tool" in (before, message["role"]) and result and result[-1]["role"] == role == "user":
            result[-1] = {"role": "user", "content": f"{result[-1]['content']}\n{text}"}
        else:
            kept = {key: value for key, value in message.items() if key not in ("tool_calls", "tool_call_id")}
            result.append(kept | {"role": role, "content": text})
        before = message["role"]
    if tools:
        lines = "\n".join(json.dumps(tool.for_template()["function"], ensure_ascii=False) for tool in tools)
        explanation = _EXPLANATION.format(tools=lines)
        first = result[0]
        order = [explanation, first["content"]]
        if first["role"] == "system":
            order.reverse()
        result[0] = first | {"content": "\n\n".join(filter(None, order))}
    return result


def _call_as_text(function: Json) -> str:
    call = {"name": function["name"], "arguments": function["arguments"]}
    return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"
