# ruff: noqa: E501, RUF001
"""Chat templates in the forms of well-known families, with their control tokens."""

from typing import NamedTuple


class Family(NamedTuple):
    source: str
    special: tuple[str, ...]
    ordinary: tuple[str, ...] = ()  # marks that are plain text tokens


_CHATML = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}{% endfor %}<|im_end|>
{% endif %}
{%- for m in messages %}
{%- if m.role == "tool" %}<|im_start|>user
<tool_response>
{{ m.content }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ m.role }}
{% set content = m.content %}
{%- if m.role == "assistant" %}
{%- if m.reasoning_content %}<think>
{{ m.reasoning_content.strip() }}
</think>

{% endif %}
{%- if "</think>" in content %}{% set content = content.split("</think>")[-1].lstrip("\\n") %}{% endif %}
{%- endif %}{{ content }}
{%- for call in m.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
<think>
{% endif %}"""
_LLAMA = """\
{{ bos_token }}{% for m in messages %}
{%- set role = "ipython" if m.role == "tool" else m.role %}
{{- "<|start_header_id|>" + role + "<|end_header_id|>\\n\\n" }}
{%- if m.tool_calls %}
{%- if m.tool_calls | length != 1 %}{{ raise_exception("one call at once") }}{% endif %}
{{- '{"name": "' + m.tool_calls[0].function.name + '", "parameters": ' }}
{{- m.tool_calls[0].function.arguments | tojson + "}" }}
{%- else %}
{{- m.content | trim }}
{%- if loop.first and tools %}{{ tools | tojson(indent=4) }}{% endif %}
{%- endif %}{{ "<|eot_id|>" }}{% endfor %}
{%- if add_generation_prompt %}{{ "<|start_header_id|>assistant<|end_header_id|>\\n\\n" }}{% endif %}"""
_MISTRAL = """\
{{ bos_token }}{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{%- for m in messages %}
{%- if m.role == "tool" %}[TOOL_RESULTS]{"content": {{ m.content | tojson }}, "id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]
{%- elif m.role == "assistant" %} {{ m.content }}
{%- if m.tool_calls %}[TOOL_CALLS][{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}]{% endif %}
{{- eos_token }}
{%- else %}[INST] {{ m.content }}[/INST]{% endif %}{% endfor %}"""
_GEMMA = """\
{{ bos_token }}{% for m in messages %}<start_of_turn>{{ "model" if m.role == "assistant" else m.role }}
{{ m.content | trim }}<end_of_turn>
{% endfor %}{% if add_generation_prompt %}<start_of_turn>model
{% endif %}"""
_PHI = """\
{% for m in messages %}{{ '<|' + m['role'] + '|>' + '\\n' + m['content'] + '<|end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}<|assistant|>
{% endif %}"""
_HARMONY = """\
<|start|>system<|message|>Reasoning: low<|end|>{% if tools %}<|start|>developer<|message|>
{%- for t in tools %}// {{ t.function.description }}
type {{ t.function.name }} = (_: {{ t.function.parameters | tojson }}) => any;{% endfor %}<|end|>{% endif %}
{%- set ns = namespace(name=none) %}{% for m in messages %}
{%- if m.role == "tool" %}
{%- if ns.name is none %}{{ raise_exception("a result needs a call before it") }}{% endif %}
{{- "<|start|>functions." + ns.name + " to=assistant<|channel|>commentary<|message|>" + m.content | tojson + "<|end|>" }}
{%- elif m.tool_calls %}
{%- if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}
{%- if m.content %}<|start|>assistant<|channel|>commentary<|message|>{{ m.content }}<|end|>{% endif %}
{%- set ns.name = m.tool_calls[0].function.name %}<|start|>assistant to={{ "functions." + ns.name }}<|channel|>commentary json<|message|>
{{- m.tool_calls[0].function.arguments | tojson }}<|call|>
{%- elif m.role == "assistant" %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|return|>
{%- else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""
_DEEPSEEK = """\
{{ bos_token }}{% for m in messages %}
{%- if m.role == "system" %}{{ m.content }}
{%- elif m.role == "user" %}{{ "<｜User｜>" + m.content }}
{%- elif m.role == "tool" %}{{ "<｜tool▁outputs▁begin｜>" + m.content + "<｜tool▁outputs▁end｜>" }}
{%- else %}
{%- set content = m.content.split("</think>")[-1] if "</think>" in m.content else m.content %}
{{- "<｜Assistant｜>" + content + "<｜end▁of▁sentence｜>" }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ "<｜Assistant｜><think>\\n" }}{% endif %}"""
_SMOLLM = """\
{% for m in messages %}{% if loop.first and messages[0].role != "system" %}<|im_start|>system
You are helpful<|im_end|>
{% endif %}{{ "<|im_start|>" + m.role + "\\n" + m.content + "<|im_end|>" + "\\n" }}{% endfor %}
{%- if add_generation_prompt %}{{ "<|im_start|>assistant\\n" }}{% endif %}"""

FAMILIES = {
    "ChatML": Family(
        _CHATML,
        ("<|im_start|>", "<|im_end|>", "<|endoftext|>"),
        ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    ),
    "Llama 3": Family(
        _LLAMA, ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>", "<|eom_id|>")
    ),
    "Mistral": Family(
        _MISTRAL,
        (
            "[INST]",
            "[/INST]",
            "[TOOL_CALLS]",
            "[AVAILABLE_TOOLS]",
            "[/AVAILABLE_TOOLS]",
            "[TOOL_RESULTS]",
            "[/TOOL_RESULTS]",
        ),
    ),
    "Gemma": Family(_GEMMA, ("<start_of_turn>", "<end_of_turn>"), ("\n\n", "<h1>")),
    "Phi": Family(_PHI, ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>")),
    "harmony": Family(
        _HARMONY,
        ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<|return|>", "<|constrain|>"),
    ),
    "DeepSeek": Family(
        _DEEPSEEK,
        (
            "<｜User｜>",
            "<｜Assistant｜>",
            "<｜end▁of▁sentence｜>",
            "<｜tool▁outputs▁begin｜>",
            "<｜tool▁outputs▁end｜>",
        ),
        ("<think>", "</think>"),
    ),
    "SmolLM2": Family(_SMOLLM, ("<|im_start|>", "<|im_end|>")),
}
