"""/openapi.json and /docs: FastAPI's description of the API, and a page without scripts."""

import asyncio
import json
from importlib.metadata import version

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.responses import HTMLResponse, JSONResponse, Response
from jinja2 import Environment

from neo_desktop.app.api.fields import Json

_PAGE = """\
<!doctype html><html lang='en'><meta charset='utf-8'>
<meta name='viewport' content='width=device-width, initial-scale=1'>
<title>neo-desktop: API</title><style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 0 auto; padding: 1rem;
color-scheme: light dark }
h2 { margin-top: 3rem; overflow-wrap: anywhere }
code, pre { font-family: ui-monospace, monospace; font-size: 0.875em; overflow-wrap: anywhere }
pre { overflow-x: auto; padding: 0.75rem; border: 1px solid #8886; border-radius: 0.5rem }
table { border-collapse: collapse; width: 100% }
td { vertical-align: top; padding: 0.25rem 0.75rem 0.25rem 0; border-bottom: 1px solid #8883 }
details { margin: 0.75rem 0 }
</style>
{% macro fields(title, schema) %}
{% set of = resolved(schema) %}
<details open><summary>{{ title }}</summary><table>
{% for name, field in of.properties.items() if none not in (field.enum or ()) %}
<tr><td><code>{{ name }}</code>{{ " (required)" if name in (of.required or ()) }}<td>{{ type(field) }}
{% endfor %}
</table>
{% for name, field in of.properties.items() if none in (field.enum or ()) %}
{{ "Accepted with the value that changes nothing: " if loop.first }}<code>{{ name }}</code>
{% endfor %}
</details>
{% endmacro %}
<h1>neo-desktop {{ api.info.version }}: API</h1>
<p>{{ api.info.description }} The same for programs: <a href='openapi.json'>openapi.json</a>.</p>
{% for path, methods in api.paths.items() %}{% for method, operation in methods.items() %}
<h2><code>{{ method.upper() }} {{ path }}</code></h2><p>{{ operation.summary }}</p>
{% if operation.requestBody %}
{% set body = operation.requestBody.content["application/json"] %}
{% for name, example in body.examples.items() %}
<p>{{ name }}:</p><pre>{{ pretty(example.value) }}</pre>
{% endfor %}
{{ fields("Fields of the body", body.schema) }}
{% endif %}
{% set reply = operation.responses["200"].content["application/json"] %}
{% if reply %}{{ fields("Fields of the answer", reply.schema) }}{% endif %}
{% endfor %}{% endfor %}
"""
_HEADERS = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}


def install(app: FastAPI, api: FastAPI) -> None:
    """Let an app describe itself and the API that it mounts at /v1."""
    built: list[Json] = []

    def document() -> Json:
        if not built:
            built.append(_document(app, api))
        return built[0]

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi() -> Response:
        return JSONResponse(await asyncio.to_thread(document))

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return HTMLResponse(await asyncio.to_thread(lambda: page(document())), headers=_HEADERS)


def _document(app: FastAPI, api: FastAPI) -> Json:
    description = "The loaded model, for programs that speak OpenAI's or Anthropic's API."
    whole, part = (
        get_openapi(
            title="neo-desktop",
            version=version("neo-desktop"),
            description=description,
            routes=routes,
            separate_input_output_schemas=False,
        )
        for routes in (app.routes, api.routes)
    )
    whole["paths"] = {f"/v1{path}": methods for path, methods in part["paths"].items()} | whole["paths"]
    whole["components"]["schemas"] |= part["components"]["schemas"]
    whole["components"]["securitySchemes"] = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    whole["security"] = [{}, {"bearer": []}, {"x-api-key": []}]
    return whole


def page(api: Json) -> str:
    """Return the page of an OpenAPI description."""
    schemas = api["components"]["schemas"]

    def resolved(schema: Json) -> Json:
        return schemas[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema

    def type_of(field: Json) -> str:
        if choices := field.get("anyOf") or field.get("oneOf"):
            kinds = dict.fromkeys(map(type_of, choices))
            return " or ".join(kind for kind in kinds if kind != "null")
        if "$ref" in field:
            inner = ", ".join(resolved(field).get("properties", {}))
            return f"{field['$ref'].rpartition('/')[2]} {{{inner}}}"
        if "const" in field or "enum" in field:
            return " or ".join(map(json.dumps, field.get("enum") or [field["const"]]))
        kind = field.get("type", "any")
        if kind == "array":
            return f"list of {type_of(field.get('items', {}))}"
        return " or ".join(kind) if isinstance(kind, list) else str(kind)

    def pretty(value: Json) -> str:
        return json.dumps(value, indent=2)

    template = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(_PAGE)
    return template.render(api=api, resolved=resolved, type=type_of, pretty=pretty)
