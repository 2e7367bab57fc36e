#!/usr/bin/env python3
"""Count right function calls by the offline part of the Berkeley Function Calling Leaderboard.

    pip install --no-deps bfcl-eval
    python -m benchmarks.function_calls --model smollm2-135m-instruct --count 50
    python -m benchmarks.function_calls --url http://127.0.0.1:8000 --choice required

Its questions go to `/v1/chat/completions`; its checker compares the calls with possible answers. "Fits"
counts answers whose calls fit the functions' schemas: the server ensures it, unless 256 tokens are too few.
"""

import argparse
import importlib.util
import json
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import httpx
import jsonschema
import openai

from scripts.server_process import served

CATEGORIES = ("simple_python", "multiple", "parallel", "irrelevance")
TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}


def checker() -> tuple[Path, Any]:
    """Return the folder of the questions, and the checker without the clients that it imports."""
    spec = importlib.util.find_spec("bfcl_eval")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("install the leaderboard first: pip install --no-deps bfcl-eval")
    models = ModuleType("bfcl_eval.constants.model_config")
    models.MODEL_CONFIG_MAPPING = {"here": SimpleNamespace(underscore_to_dot=True)}  # type: ignore[attr-defined]
    sys.modules[models.__name__] = models
    from bfcl_eval.constants.enums import Language  # noqa: PLC0415
    from bfcl_eval.eval_checker.ast_eval.ast_checker import ast_checker  # noqa: PLC0415

    def check(functions: Any, calls: Any, answers: Any, category: str) -> bool:
        return bool(ast_checker(functions, calls, answers, Language.PYTHON, category, "here")["valid"])

    return Path(spec.submodule_search_locations[0]) / "data", check


def schema_of(value: Any) -> Any:
    """Return the JSON schema of a parameter description, which has Python's names of types."""
    if isinstance(value, list):
        return [schema_of(each) for each in value]
    if not isinstance(value, dict):
        return value
    schema = {name: schema_of(each) for name, each in value.items()}
    if isinstance(value.get("type"), str):
        schema["type"] = TYPES.get(value["type"], value["type"])
    return schema


def lines(path: Path) -> list[Any]:
    """Return the values of a file with one JSON value a line."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def ask(
    client: openai.OpenAI, model: str, question: Any, choice: Any, *, several: bool
) -> tuple[list[dict[str, Any]], bool]:
    """Return the calls that the model made, and whether all calls fit their schemas."""
    schemas = {
        re.sub(r"\.", "_", function["name"]): schema_of(function["parameters"])
        for function in question["function"]
    }
    tools: Any = [
        {
            "type": "function",
            "function": {"name": name, "description": function["description"], "parameters": schemas[name]},
        }
        for name, function in zip(schemas, question["function"], strict=True)
    ]
    answer = client.chat.completions.create(
        model=model,
        messages=question["question"][0],
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=several,
        temperature=0,
        max_tokens=256,
    )
    calls, fits = [], True
    for call in answer.choices[0].message.tool_calls or []:
        assert call.type == "function"
        try:
            arguments = json.loads(call.function.arguments)
            jsonschema.validate(arguments, schemas[call.function.name])
        except (ValueError, KeyError, jsonschema.ValidationError):
            fits = False
            continue
        calls.append({call.function.name: arguments})
    return calls, fits


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", help="of a server that runs; otherwise one is started")
    parser.add_argument("--model", help="its name or path; otherwise the built-in one")
    parser.add_argument("--count", type=int, default=100, help="questions of each category")
    parser.add_argument(
        "--choice", choices=("auto", "required"), default="auto", help="the field tool_choice"
    )
    options = parser.parse_args()
    folder, check = checker()
    chosen = () if options.model is None else ("--model", options.model)
    with served(options.url, *chosen) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=600)
        model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
        print(f"{model}, tool_choice {options.choice}\n")
        print("| category | questions | called | fits | right |\n|---|---|---|---|---|")
        for category in CATEGORIES:
            if category == "irrelevance" and options.choice == "required":
                continue  # right is no call
            questions = lines(folder / f"BFCL_v4_{category}.json")[: options.count]
            with ThreadPoolExecutor(8) as pool:
                asked = partial(ask, client, model, choice=options.choice, several=category == "parallel")
                found = list(pool.map(asked, questions))
            if category == "irrelevance":
                right = [not calls and fits for calls, fits in found]
            else:
                answers = {
                    each["id"]: each["ground_truth"]
                    for each in lines(folder / "possible_answer" / f"BFCL_v4_{category}.json")
                }
                right = [
                    fits
                    and bool(calls)
                    and check(question["function"], calls, answers[question["id"]], category)
                    for question, (calls, fits) in zip(questions, found, strict=True)
                ]
            called = sum(bool(calls) or not fits for calls, fits in found)
            fit = sum(fits for calls, fits in found if calls or not fits)
            print(f"| {category} | {len(questions)} | {called} | {fit} | {sum(right)} |", flush=True)


if __name__ == "__main__":
    main()
