"""Suite `load`: what clients see as more and more requests come, at times that they choose themselves."""

from neo_desktop.app.bench.load.options import LoadOptions
from neo_desktop.app.bench.load.report import LoadReport
from neo_desktop.app.bench.load.suite import run_load

__all__ = ["LoadOptions", "LoadReport", "run_load"]
