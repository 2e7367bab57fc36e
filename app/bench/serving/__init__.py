"""Suite `load`: what clients see as more and more requests come, at times that they choose themselves."""

from neo_desktop.app.bench.serving.options import LoadOptions
from neo_desktop.app.bench.serving.report import LoadReport
from neo_desktop.app.bench.serving.suite import run_load

__all__ = ["LoadOptions", "LoadReport", "run_load"]
