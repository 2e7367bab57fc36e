"""/docs: the API on one page, made from /openapi.json; no scripts, nothing from elsewhere."""

import json
from functools import cache
from html import escape

from fastapi import FastAPI
from fastapi.responses import HTMLResponse, Response

from neo_desktop.app.api.fields import Json
from neo_desktop.app.api.openapi import document

_STYLE = """\
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 0 auto; padding: 1rem;
color-scheme: light dark }
h2 { margin-top: 3rem; overflow-wrap: anywhere }
code, pre { font-family: ui-monospace, monospace; font-size: 0.875em; overflow-wrap: anywhere }
pre { overflow-x: auto; padding: 0.75rem; border: 1px solid #8886; border-radius: 0.5rem }
table { border-collapse: collapse; width: 100% }
td { vertical-align: top; padding: 0.25rem 0.75rem 0.25rem 0; border-bottom: 1px solid #8883 }
details { margin: 0.75rem 0 }
"""
_HEADERS = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}


def install(app: FastAPI) -> None:
    """Let an app describe the API at /openapi.json and /docs."""

    @app.get("/openapi.json")
    async def openapi() -> Response:
        return Response(document(), media_type="application/json")

    @app.get("/docs")
    async def docs() -> Response:
        return HTMLResponse(page(), headers=_HEADERS)


@cache
def page() -> str:
    """The page."""
    api = json.loads(document())
    schemas = api["components"]["schemas"]
    parts = [
        "<!doctype html><html lang='en'><meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width, initial-scale=1'>",
        f"<title>neo-desktop: API</title><style>{_STYLE}</style>",
        f"<h1>neo-desktop {escape(api['info']['version'])}: API</h1><p>{escape(api['info']['description'])} ",
        "The same for programs: <a href='openapi.json'>openapi.json</a>.</p><ul>",
    ]
    operations = [
        (method, path, operation)
        for path, methods in api["paths"].items()
        for method, operation in methods.items()
    ]
    parts += [
        f"<li><a href='#{operation['operationId']}'><code>{method.upper()} {escape(path)}</code></a> "
        f"{escape(operation['summary'])}</li>"
        for method, path, operation in operations
    ]
    parts.append("</ul>")
    for method, path, operation in operations:
        title = f"<code>{method.upper()} {escape(path)}</code>"
        parts.append(f"<h2 id='{operation['operationId']}'>{title}</h2><p>{escape(operation['summary'])}</p>")
        if "requestBody" in operation:
            body = operation["requestBody"]["content"]["application/json"]
            for name, example in body["examples"].items():
                text = json.dumps(example["value"], indent=2)
                parts.append(f"<p>{escape(name)}:</p><pre>{escape(text)}</pre>")
            parts.append(_fields("Fields of the body", body["schema"], schemas))
        (reply, *_) = operation["responses"]["200"]["content"].values()
        if "schema" in reply:
            parts.append(_fields("Fields of the answer", reply["schema"], schemas))
    return "\n".join(parts)


def _fields(title: str, schema: Json, schemas: Json) -> str:
    """A table of an object's fields; those that only accept a default are named below it."""
    schema = _resolved(schema, schemas)
    required = schema.get("required", ())
    rows, defaults = [], []
    for name, field in schema.get("properties", {}).items():
        if "enum" in field and None in field["enum"]:
            defaults.append(f"<code>{escape(name)}</code>")
            continue
        mark = " (required)" if name in required else ""
        rows.append(f"<tr><td><code>{escape(name)}</code>{mark}<td>{escape(_type(field, schemas))}")
    note = f"<p>Accepted with the value that changes nothing: {', '.join(defaults)}.</p>" if defaults else ""
    return f"<details open><summary>{title}</summary><table>{''.join(rows)}</table>{note}</details>"


def _type(field: Json, schemas: Json) -> str:
    """A field's type in a few words."""
    if "anyOf" in field or "oneOf" in field:
        kinds = [_type(kind, schemas) for kind in field.get("anyOf") or field["oneOf"]]
        return " or ".join(dict.fromkeys(kind for kind in kinds if kind != "null"))
    if "$ref" in field:
        name = field["$ref"].rpartition("/")[2]
        inner = ", ".join(_resolved(field, schemas).get("properties", {}))
        return f"{name} {{{inner}}}"
    if "const" in field:
        return json.dumps(field["const"])
    if "enum" in field:
        return " or ".join(map(json.dumps, field["enum"]))
    kind = field.get("type", "any")
    if kind == "array":
        return f"list of {_type(field.get('items', {}), schemas)}"
    return " or ".join(one for one in kind if one != "null") if isinstance(kind, list) else str(kind)


def _resolved(schema: Json, schemas: Json) -> Json:
    reference = schema.get("$ref")
    return schemas[reference.rpartition("/")[2]] if reference else schema
