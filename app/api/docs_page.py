"""/openapi.json and /docs: FastAPI's description of the API, and a page without scripts."""

import asyncio
import json

from fastapi import FastAPI
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
td { vertical-align: top; padding: 0.25rem 0.75rem 0.25rem 0; border-bottom: 1px solid #8883 }
</style>
<h1>neo-desktop {{ api.info.version }}: API</h1>
<p>{{ api.info.description }} The same for programs: <a href='openapi.json'>openapi.json</a>.</p>
{% for path, methods in api.paths.items() %}{% for method, operation in methods.items() %}
<h2><code>{{ method.upper() }} {{ api.servers[0].url }}{{ path }}</code></h2><p>{{ operation.summary }}</p>
{% if operation.requestBody %}
{% set body = operation.requestBody.content["application/json"] %}
<pre>{{ body.examples.example.value | tojson(indent=2) }}</pre>
{% set schema = resolved(body.schema) %}
<table>
{% for name, field in schema.properties.items() %}
<tr><td><code>{{ name }}</code>{{ " (required)" if name in (schema.required or ()) }}<td>{{ type(field) }}
{% endfor %}
</table>
{% endif %}
{% endfor %}{% endfor %}
"""
_HEADERS = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}


def install(app: FastAPI, api: FastAPI) -> None:
    """Let an app describe the API that it mounts."""

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi() -> Response:
        return JSONResponse(await asyncio.to_thread(api.openapi))

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return HTMLResponse(await asyncio.to_thread(lambda: page(api.openapi())), headers=_HEADERS)


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
        if field.get("type") == "array":
            return f"list of {type_of(field.get('items', {}))}"
        return str(field.get("type", "any"))

    template = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(_PAGE)
    return template.render(api=api, resolved=resolved, type=type_of)
