"""A report as one HTML file that needs nothing else: styles and pictures are inside."""

from base64 import b64encode
from collections.abc import Mapping

from jinja2 import Environment

from neo_desktop.app.bench.page.content import headline, machine_lines, sections
from neo_desktop.app.bench.report import Report

_TEMPLATE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>neo-desktop bench: {{ report.machine.cpu }}</title>
<style>
  :root { color-scheme: light; }
  body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem;
    color: #1c1c1c; }
  h1 { font-size: 1.4rem; } h2 { font-size: 1.2rem; margin-top: 2.5rem; }
  .verdict { font-size: 1.25rem; border-left: .3rem solid #2f6fb0; padding: .2rem 0 .2rem 1rem; }
  .verdict p { margin: .3rem 0; }
  .scroll { overflow-x: auto; }
  table { border-collapse: collapse; margin: .8rem 0; font-variant-numeric: tabular-nums; font-size: .9rem; }
  caption { text-align: left; font-weight: 600; padding: .3rem 0; }
  th, td { padding: .2rem .7rem; text-align: right; border-bottom: 1px solid #ddd; }
  th:first-child, td:first-child { text-align: left; }
  img { max-width: 100%; height: auto; }
  figure { margin: 1rem 0; } figcaption, .notes, footer { color: #555; font-size: .9rem; }
</style>
</head>
<body>
<h1>neo-desktop bench</h1>
<div class="verdict">{% for line in headline %}<p>{{ line }}</p>{% endfor %}</div>
<ul>{% for line in machine %}<li>{{ line }}</li>{% endfor %}</ul>
{% for section in sections %}
<h2>{{ section.title }}</h2>
<p>{{ section.summary }}</p>
{% for table in section.tables %}
<div class="scroll"><table>
{% if table.title %}<caption>{{ table.title }}</caption>{% endif %}
<thead><tr>{% for column in table.columns %}<th scope="col">{{ column }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in table.rows %}
<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}
</tbody>
</table></div>
{% endfor %}
{% for plot in section.plots %}
<figure><img alt="{{ plot.title }}" src="data:image/png;base64,{{ pictures[plot.name] }}">
<figcaption>{{ plot.title }}</figcaption></figure>
{% endfor %}
{% if section.notes %}
<ul class="notes">{% for note in section.notes %}<li>{{ note }}</li>{% endfor %}</ul>
{% endif %}
{% endfor %}
<footer>neo-desktop {{ report.machine.neo_desktop }}, {{ report.started }}</footer>
</body>
</html>
"""


def html(report: Report, pictures: Mapping[str, bytes]) -> str:
    """Return the page; `pictures` is `name of a plot -> PNG`."""
    template = Environment(autoescape=True, trim_blocks=True).from_string(_TEMPLATE)
    return template.render(
        report=report,
        headline=headline(report),
        machine=machine_lines(report),
        sections=sections(report),
        pictures={name: b64encode(png).decode("ascii") for name, png in pictures.items()},
    )
