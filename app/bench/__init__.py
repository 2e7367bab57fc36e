"""The hardware self-test: suites that measure this computer and say what its limit is."""

from neo_desktop.app.bench.cost_model import CostModelOptions
from neo_desktop.app.bench.cpu_attention.options import CpuAttentionOptions
from neo_desktop.app.bench.gpu.suite import GpuOptions
from neo_desktop.app.bench.hardware.suite import HardwareOptions
from neo_desktop.app.bench.load.suite import LoadOptions
from neo_desktop.app.bench.report import Report, ReportError
from neo_desktop.app.bench.run import SUITES, SuiteOptions, run_suites
from neo_desktop.app.bench.throughput.suite import ThroughputOptions
from neo_desktop.app.bench.weights.suite import WeightsOptions
from neo_desktop.engine.progress import Progress

__all__ = [
    "SUITES",
    "CostModelOptions",
    "CpuAttentionOptions",
    "GpuOptions",
    "HardwareOptions",
    "LoadOptions",
    "Progress",
    "Report",
    "ReportError",
    "SuiteOptions",
    "ThroughputOptions",
    "WeightsOptions",
    "run_suites",
]
