"""Chat templates, against transformers."""

import json
from collections.abc import Mapping
from datetime import datetime

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from neo_desktop.app.templates.chat_template import ChatTemplate, ChatTemplateError

SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

# Written for these tests in the manner of well-known models.
TEMPLATES = {
    "headers, as with Llama 3": """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" }}
{%- endif %}
{{- "Knowledge ends in 2023\\nToday is " + strftime_now("%d %b %Y") + "\\n\\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
""",
    "instructions, as with Mistral": """\
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- bos_token }}
{%- set ns = namespace(index=0) %}
{%- for message in loop_messages %}
    {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
        {{- raise_exception("user and assistant must alternate") }}
    {%- endif %}
    {%- set ns.index = ns.index + 1 %}
{%- endfor %}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"] + eos_token }}
    {%- endif %}
{%- endfor %}
""",
    "ChatML, as with Qwen": """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}<|im_end|>
{%- endif %}
{%- set ns = namespace(last_query=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- if message.role == "user" %}
        {%- set ns.last_query = (messages|length - 1) - loop.index0 %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == "assistant" and loop.index0 < ns.last_query and "</think>" in content %}
        {%- set content = content.split("</think>")[-1].lstrip("\\n") %}
    {%- endif %}
    {{- "<|im_start|>" ~ message.role ~ "\\n" ~ content ~ "<|im_end|>\\n" }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "<|im_start|>assistant\\n" }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- "<think>\\n\\n</think>\\n\\n" }}
    {%- endif %}
{%- endif %}
""",
    "training marks": """\
{% for message in messages %}
    {% if message.role == 'assistant' %}
{% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}

    {% else %}
    {{ {"role": message.role, "text": message.content, "html": "<b>"} | tojson(indent=1) }}
    {% endif %}
{% endfor %}
{{ messages | map(attribute='role') | join(',') }}
""",
}
CHATS = {
    "one question": [{"role": "user", "content": "  What is 2 + 2?\n"}],
    "with a system message": [
        {"role": "system", "content": "Be brief. <b>&amp;</b>"},
        {"role": "user", "content": "héllo 你好 👋"},
    ],
    "several turns": [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "<think>hm</think>\n\ntwo"},
        {"role": "user", "content": "three {{ not_a_template }}"},
    ],
}


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("extra", [{}, {"enable_thinking": False}], ids=["plain", "extra"])
def test_equals_transformers(template: str, chat: str, extra: Mapping[str, object]) -> None:
    reference = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), **SPECIAL_TOKENS)
    expected = reference.apply_chat_template(
        CHATS[chat], chat_template=TEMPLATES[template], tokenize=False, add_generation_prompt=True, **extra
    )
    assert ChatTemplate(TEMPLATES[template], SPECIAL_TOKENS).render(CHATS[chat], extra) == expected


def render(source: str | None, content: str = "x") -> str:
    return ChatTemplate(source, SPECIAL_TOKENS).render([{"role": "user", "content": content}])


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (None, "^the model has no chat template: use /v1/completions"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for %}", "chat template refused"),
        ("{{ messages[0].content.nothing.more }}", "no attribute"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "not safely callable|unsafe"),
        ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "recursion"),
        ("{% for i in 5 %}{% endfor %}", "not iterable"),
        ("{% for i in range(10**9) %}{% endfor %}", "too big"),
        ("{% for i in range(99) %}{{ messages[0].content }}{% endfor %}", "characters"),
    ],
)
def test_a_template_that_fails_says_why(source: str | None, reason: str) -> None:
    with pytest.raises(ChatTemplateError, match=reason):
        render(source, "x" * 2**20)


def test_messages_cannot_be_replaced_but_the_answers_beginning_can_be_left_out() -> None:
    template = ChatTemplate("{{ messages | length }}{{ add_generation_prompt }}", {})
    messages = [{"role": "user", "content": "x"}]
    assert template.render(messages, {"messages": []}) == "1True"
    assert template.render(messages, {"add_generation_prompt": False}) == "1False"


def test_the_date_is_todays() -> None:
    assert json.loads(render("{{ strftime_now('%Y') }}")) in (datetime.now().year, datetime.now().year - 1)
