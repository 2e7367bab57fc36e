"""Tools in the words of a model's family: how they are shown to it, and how it writes its calls."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from neo_desktop.app.generate.structure import enforced, in_lark
from neo_desktop.engine.grammar import json_rule
from neo_desktop.engine.json_schema import Json
from neo_desktop.models import harmony


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may ask its client to call; `parameters` is a JSON schema."""

    name: str
    description: str | None
    parameters: Json
    is_strict: bool = False  # a schema that cannot be enforced in full is refused

    def enforced(self) -> Json:
        """The enforceable part of the schema of its arguments, an empty object where there is none."""
        whose = f"tool {self.name!r}"
        types = self.parameters.get("type", "object")
        if types != "object" and not (isinstance(types, list) and "object" in types):
            raise ValueError(f"{whose}, $: 'type' must be \"object\": arguments have names")
        own = self.parameters or {"properties": {}}
        return enforced(own | {"type": "object"}, whose, self.is_strict)

    def for_template(self) -> Json:
        function = {"name": self.name, "description": self.description or "", "parameters": self.parameters}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """The obligation to call a tool, or one certain tool."""

    is_required: bool = False
    name: str | None = None  # the only one that it may call


AUTO = ToolChoice()
_REQUIRED = ToolChoice(is_required=True)
CHOICES = {"auto": AUTO, "none": None, "any": _REQUIRED, "required": _REQUIRED}


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """The form of one family's calls: marks around JSON objects like {"name": "f", "arguments": {"a": 1}}.

    A call that must come is begun in the prompt with `opening`; a grammar sees to the rest.
    """

    opening: str
    closing: str = ""
    separators: str = ""  # what else than white space may stand between calls
    arguments_key: str = "arguments"
    in_list: bool = False  # the objects stand in one list after one mark
    is_bare: bool = False  # a text that begins with "{" is a call without any mark
    has_names: bool = False  # name, then the arguments alone: f[ARGS]{"a": 1}
    in_template: bool = True  # the model's template shows tools, calls and results.
    short_ids: bool = False  # the template wants ids of nine letters and digits.
    single_calls: bool = False  # the template takes one call per message.
    on_channels: bool = False  # headers tell calls, thoughts and answers: see `models.harmony`

    def prompt_end(self) -> str:
        """Return the end of a prompt before a call that must come."""
        return "" if self.is_bare else self.opening + ("\n" if self.closing else "")

    def grammar(self, tools: Sequence[Tool], *, is_parallel: bool, arguments_mark: str = '"[ARGS]"') -> str:
        """Lark rules of `calls`, after `prompt_end`; `arguments_mark` follows a name."""
        rules = [f"call: {' | '.join(f'call_{i}' for i in range(len(tools)))}"]
        for i, tool in enumerate(tools):
            if self.has_names:
                rules.append(f"call_{i}: {in_lark(tool.name)} {arguments_mark} arguments_{i}")
            else:
                name = json.dumps(tool.name, ensure_ascii=False)
                head = in_lark(f'{{"name": {name}, "{self.arguments_key}": ')
                rules.append(f'call_{i}: {head} arguments_{i} "}}"')
            # Its own grammar, so that references within the schema still hold.
            rules.append(f"arguments_{i}: %json {json_rule(tool.enforced())}")
        if self.closing:
            between = json.dumps(f"\n{self.closing}\n{self.opening}\n")
            end = json.dumps(f"\n{self.closing}")
            start = f"call ({between} call)* {end}" if is_parallel else f"call {end}"
        elif self.in_list:
            start = '"[" call (", " call)* "]"' if is_parallel else '"[" call "]"'
        elif self.is_bare and is_parallel:
            start = 'call ("; " call)*'
        else:
            start = "call"
        return "\n".join([f"calls: {start}", *rules])


HERMES = ToolFormat("<tool_call>", "</tool_call>")
EXPLAINED = ToolFormat("<tool_call>", "</tool_call>", in_template=False)
LLAMA = ToolFormat(
    "<|python_tag|>",
    separators=";",
    arguments_key="parameters",
    is_bare=True,
    single_calls=True,
)
MISTRAL = ToolFormat("[TOOL_CALLS]", in_list=True, short_ids=True)
MISTRAL_NAMES = ToolFormat("[TOOL_CALLS]", has_names=True, short_ids=True)
HARMONY = ToolFormat(harmony.CALL, has_names=True, single_calls=True, on_channels=True)


def format_of(template: str | None) -> ToolFormat:
    """The family's format, told by the text of its chat template; `EXPLAINED` where it knows no tools."""
    if template is None or not re.search(r"\btools\b", template):
        return EXPLAINED
    if harmony.CHANNEL in template:
        return HARMONY
    if "[TOOL_CALLS]" in template:
        return MISTRAL_NAMES if "[ARGS]" in template else MISTRAL
    if "<tool_call>" in template and "<function=" not in template:
        return HERMES
    if "<|start_header_id|>" in template and "parameters" in template:
        return LLAMA
    return EXPLAINED
