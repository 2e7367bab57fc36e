#!/usr/bin/env python3
"""Compare prompts with those of Transformers and llama.cpp, by the engines of ggufdoctor.

    pip install ggufdoctor
    python -m benchmarks.chat_templates MODEL.gguf ...

Renders its conversations by each file's chat template. Exits with 1 if a prompt differs from Transformers'.
`ggufdoctor MODEL.gguf` explains defects of a template itself.
"""

import sys
from pathlib import Path
from typing import Any

from neo_desktop.app.templates.chat_template import ChatTemplate, ChatTemplateError
from neo_desktop.models.checkpoint import open_checkpoint

OURS, THEIRS, LLAMA_CPP = "neo-desktop", "Transformers", "llama.cpp"


def ours(template: ChatTemplate, context: dict[str, Any]) -> str | None:
    """Return the prompt here; None: the template refuses the conversation."""
    try:
        return template.render(context["messages"], {k: v for k, v in context.items() if k != "messages"})
    except ChatTemplateError:
        return None


def differences(path: Path) -> int:
    """Print a line per conversation of a file; return the number that differ from Transformers."""
    from ggufdoctor.engines.registry import select_engines  # noqa: PLC0415
    from ggufdoctor.fixtures import load_fixtures  # noqa: PLC0415

    tokenizer = open_checkpoint(path).tokenizer()
    if tokenizer.chat_template is None:
        print(f"{path.name}: no chat template")
        return 0
    template, count = ChatTemplate(tokenizer.chat_template, tokenizer.special_tokens), 0
    for fixture in load_fixtures():
        context = tokenizer.special_tokens | fixture.context
        found = {OURS: ours(template, fixture.context)}
        for name, engine in zip((THEIRS, LLAMA_CPP), select_engines(None).engines, strict=True):
            found[name] = engine.render(tokenizer.chat_template, context).text
        words = [
            f"{name}: {'refuses' if text is None else 'equal' if text == found[OURS] else 'differs'}"
            for name, text in found.items()
        ]
        print(f"{path.name}, {fixture.name}: {', '.join(words)}")
        count += found[OURS] != found[THEIRS]
    return count


if __name__ == "__main__":
    sys.exit(sum(differences(Path(name)) for name in sys.argv[1:]) > 0)
