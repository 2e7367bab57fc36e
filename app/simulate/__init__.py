"""What each policy would bring on a machine that nobody here needs to own."""

from neo_desktop.app.commands.simulate_command import SimulationOptions, UsageError
from neo_desktop.app.simulate.report import SimulationReport
from neo_desktop.app.simulate.run import run_simulation

__all__ = ["SimulationOptions", "SimulationReport", "UsageError", "run_simulation"]
