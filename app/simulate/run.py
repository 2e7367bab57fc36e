"""From options to a workload, a machine and a report."""

from neo_desktop.app.commands.simulate_command import SimulationOptions, UsageError
from neo_desktop.app.simulate.machine import machine
from neo_desktop.app.simulate.report import SimulationReport
from neo_desktop.app.simulate.workers import add_workers
from neo_desktop.engine.kv.layout import BLOCK_SIZE
from neo_desktop.engine.options import most_requests
from neo_desktop.engine.progress import Progress
from neo_desktop.engine.schedule.policies import POLICIES
from neo_desktop.engine.schedule.scheduler import SchedulerLimits
from neo_desktop.engine.simulation.bound import Bound, Room
from neo_desktop.engine.simulation.reality import Mismatch
from neo_desktop.engine.simulation.simulator import simulate
from neo_desktop.engine.simulation.workers import WORKERS
from neo_desktop.engine.simulation.workload import WorkloadRequest, load_trace, synthetic, with_rate

# As a chat in the middle of a conversation: the Azure conversation trace has 1,155 tokens in and 211 out.
CHATS, CHAT_INPUT_TOKENS, CHAT_OUTPUT_TOKENS = 100, 1000, 200


def run_simulation(options: SimulationOptions, progress: Progress) -> SimulationReport:
    """Simulate the workload under every policy, or the one that is named.

    Raises:
        UsageError: the options make no sense.
        WorkloadError: the trace is malformed.
        ValueError: the tables are.
        MemoryError: the model does not fit the GPU.
        OSError: a file cannot be read.
    """
    limits = _limits(options)
    requests = _workload(options)
    if options.policy is not None and options.policy not in POLICIES:
        raise UsageError(f"there is no policy {options.policy!r}: choose one of {', '.join(POLICIES)}")
    mismatch = _mismatch(options)
    where = add_workers(machine(options, limits), options, requests, limits)
    most = where.config.max_context_tokens
    context = min(options.max_context_tokens or most, most)
    names = [options.policy] if options.policy else list(POLICIES)
    results = {}
    most_attended = 0  # tokens that the device attends to
    for index, name in enumerate(names):

        def report(done: int, total: int, index: int = index, name: str = name) -> None:
            progress((index + done / total) / len(names), name)

        budget = where.budget
        # Workers attend in place of the host, whose memory nobody counts: nothing is swapped.
        if POLICIES[name].swaps and where.fleet is None:
            budget = budget.swapping(where.cost, limits)
        most_attended = max(most_attended, budget.gpu_tokens + budget.swapped_tokens)
        policy, workers = POLICIES[name], None if where.fleet is None else WORKERS
        if workers is not None and any(place.cpu_attends for place in policy.places):
            policy = policy.with_places([workers])
        results[name] = simulate(
            requests,
            policy,
            where.cost,
            budget.num_blocks(workers),
            BLOCK_SIZE,
            limits,
            max_context_tokens=context,
            mismatch=mismatch,
            seed=options.seed,
            progress=report,
        )
    fitting = [r for r in requests if r.total_tokens <= context]
    room = Room(most_attended, where.budget.cpu_tokens, limits.max_batch_requests)
    bound = Bound(where.cost, fitting, room)
    return SimulationReport(
        machine=where,
        options=options,
        requests=tuple(requests),
        context_tokens=context,
        results=results,
        bound_output_tokens_per_s=bound.output_tokens_per_s() if fitting else 0.0,
    )


def _limits(options: SimulationOptions) -> SchedulerLimits:
    most = options.max_batch_requests or most_requests(options.max_batch_tokens)
    try:
        return SchedulerLimits(options.max_batch_tokens, most, options.max_token_ms)
    except ValueError as error:
        raise UsageError(str(error)) from None


def _mismatch(options: SimulationOptions) -> Mismatch | None:
    factors = (options.gpu_slowdown, options.cpu_slowdown, options.noise)
    try:
        return None if factors == (1.0, 1.0, 0.0) else Mismatch(*factors)
    except ValueError as error:
        raise UsageError(str(error)) from None


def _workload(options: SimulationOptions) -> list[WorkloadRequest]:
    if options.trace is not None:
        if (options.input_tokens, options.output_tokens) != (None, None):
            raise UsageError("give either --trace or --input and --output, not both")
        requests = load_trace(options.trace)[: options.num_requests]
    else:
        requests = synthetic(
            options.num_requests or CHATS,
            options.input_tokens or CHAT_INPUT_TOKENS,
            options.output_tokens or CHAT_OUTPUT_TOKENS,
            options.seed,
        )
    if options.rate is None:
        return requests
    try:
        return with_rate(requests, options.rate, options.seed)
    except ValueError as error:
        raise UsageError(str(error)) from None
