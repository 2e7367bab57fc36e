"""The scripts that make the built-in model are not part of the package: found from the checkout."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))
