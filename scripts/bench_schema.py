"""Write docs/bench-report.schema.json: what `neo-desktop bench --json` writes."""

import json
from pathlib import Path

from neo_desktop.app.bench.report import json_schema

if __name__ == "__main__":
    target = Path(__file__).parents[1] / "docs" / "bench-report.schema.json"
    target.write_text(json.dumps(json_schema(), indent=2) + "\n", encoding="utf-8")
