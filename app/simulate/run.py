"""From options to a workload, a machine and a report."""

from typer import BadParameter

from neo_desktop.app.simulate.machine import machine
from neo_desktop.app.simulate.options import SimulationOptions
from neo_desktop.app.simulate.report import SimulationReport
from neo_desktop.engine.kv.layout import BLOCK_SIZE
from neo_desktop.engine.options import MAX_BATCH_TOKENS, MAX_TOKEN_MS, most_requests
from neo_desktop.engine.progress import Progress
from neo_desktop.engine.schedule.policies import POLICIES
from neo_desktop.engine.schedule.scheduler import SchedulerLimits
from neo_desktop.engine.simulation.bound import Bound, Room
from neo_desktop.engine.simulation.simulator import simulate
from neo_desktop.engine.simulation.workload import synthetic, with_rate

_TOKENS = MAX_BATCH_TOKENS["cuda"]
LIMITS = SchedulerLimits(_TOKENS, most_requests(_TOKENS), MAX_TOKEN_MS)


def run_simulation(options: SimulationOptions, progress: Progress) -> SimulationReport:
    """Simulate the workload under every policy, or the one that is named; see `machine` for errors."""
    requests = synthetic(options.num_requests, options.input_tokens, options.output_tokens)
    if options.rate is not None:
        requests = with_rate(requests, options.rate, 0)
    if options.policy is not None and options.policy not in POLICIES:
        known = ", ".join(POLICIES)
        raise BadParameter(
            f"there is no policy {options.policy!r}: choose one of {known}", param_hint="--policy"
        )
    where = machine(options, LIMITS)
    names = [options.policy] if options.policy else list(POLICIES)
    results = {}
    most_attended = 0  # tokens that the device attends to
    for index, name in enumerate(names):

        def report(done: int, total: int, index: int = index, name: str = name) -> None:
            progress((index + done / total) / len(names), name)

        budget = where.budget.swapping(where.cost, LIMITS) if POLICIES[name].swaps else where.budget
        most_attended = max(most_attended, budget.gpu_tokens + budget.streamed_tokens)
        results[name] = simulate(
            requests,
            POLICIES[name],
            where.cost,
            budget.num_blocks(None),
            BLOCK_SIZE,
            LIMITS,
            max_context_tokens=where.config.max_context_tokens,
            num_states=budget.num_states,
            acceptance=options.acceptance,
            progress=report,
        )
    fitting = [r for r in requests if r.total_tokens <= where.config.max_context_tokens]
    most = min(LIMITS.max_batch_requests, where.budget.most_requests)
    bound = Bound(where.cost, fitting, Room(most_attended, where.budget.cpu_tokens, most))
    return SimulationReport(
        machine=where,
        requests=tuple(requests),
        results=results,
        acceptance=options.acceptance,
        bound_output_tokens_per_s=bound.output_tokens_per_s() if fitting else 0.0,
    )
