"""In plain words: what offloading does right now."""

from neo_desktop.app.llamacpp.choice import LLAMACPP_NOTE
from neo_desktop.engine.live import LiveRequest, LiveView, Phase
from neo_desktop.engine.stats import LLAMACPP

IMITATED = "neo-desktop uses no GPU on this computer: the GPU's part is imitated on the CPU."


def sentence(view: LiveView) -> str:
    """Say what the engine does, and what GPU memory alone would allow."""
    stats, num_running = view.stats, len(view.requests)
    if num_running + stats.num_waiting == 0:
        return " ".join(("No chat is waiting for an answer.", _room(view)))
    if stats.backend == LLAMACPP:
        return _one_by_one(view)
    parts = [_running(view)] if num_running else []
    if stats.num_waiting:
        parts.append(_waiting(view))
    if behind := sum(request.is_held for request in view.requests):
        it_waits = "one of them waits" if behind == 1 else f"{behind} of them wait"
        parts.append(f"The CPU has more to do than fits beside the GPU's work: {it_waits} for a later round.")
    return " ".join(parts)


def notes(view: LiveView) -> list[str]:
    if view.stats.backend == LLAMACPP:
        return [LLAMACPP_NOTE]
    return [*([IMITATED] if view.is_gpu_imitated else []), *_given_back(view), *_of_workers(view)]


def _given_back(view: LiveView) -> list[str]:
    """Name the shrunken caches, each in a sentence."""
    return [
        f"Other programs need main memory: the {tier.title} has room for "
        f"{pool.num_blocks * view.stats.block_size:,} tokens for now, and gave back that of "
        f"{pool.num_given_back_blocks * view.stats.block_size:,}."
        for tier, pool in view.stats.pools.items()
        if pool.num_given_back_blocks
    ]


def _of_workers(view: LiveView) -> list[str]:
    """Describe the workers, each in a sentence."""
    said = []
    for tier, state in view.workers.items():
        num = sum(request.tier == tier for request in view.requests)
        tokens = view.stats.pools[tier].num_blocks * view.stats.block_size
        does = f"attends for {num} chat{'s' * (num != 1)}" if num else "is there"
        state_now = f"{does}; it has room for {tokens:,} tokens"
        if state.lost is not None:
            again = "its chats are computed again elsewhere, and it is used again as soon as it answers"
            state_now = f"is lost ({state.lost}): {again}"
        said.append(f"{tier} at {state.address} {state_now}.")
    return said


def _one_by_one(view: LiveView) -> str:
    waiting = view.stats.num_waiting
    if not view.requests:
        return _waiting(view)
    parts = [f"1 chat: {_doing(view.requests[0])}."]
    if waiting:
        parts.append(f"{'1 more waits' if waiting == 1 else f'{waiting} more wait'} for their turn.")
    return " ".join(parts)


def _gpu(view: LiveView) -> str:
    return "the imitated GPU" if view.is_gpu_imitated else "the GPU"


def _running(view: LiveView) -> str:
    gpu, num = _gpu(view), len(view.requests)
    if num == 1:
        return _single(view)
    num_workers = sum(request.tier.is_remote for request in view.requests)
    num_cpu = sum(request.tier.in_host_memory for request in view.requests) - num_workers
    num_gpu = num - num_cpu - num_workers
    chats = f"{num} chats at once"
    if num_workers:
        chats += f": {num_gpu} with their memory on {gpu}, {num_cpu} in main memory, {num_workers} on workers"
        return f"{chats}, which attend for them while {gpu} computes.{_alone(view)}"
    if num_gpu == num:
        if view.stats.policy == "gpu-only" and view.stats.num_waiting:
            return f"{chats}, as many as the memory of {gpu} holds."
        return f"{chats}, all with their memory on {gpu}: it has room, and nothing is offloaded."
    if num_cpu == num:
        chats += ", all with their memory in main memory, where the CPU attends for them"
        return f"{chats} while {gpu} computes the rest.{_alone(view)}"
    have = "1 has its" if num_gpu == 1 else f"{num_gpu} have their"
    them = "it" if num_cpu == 1 else "them"
    chats += f": {have} memory on {gpu}, {num_cpu} in main memory, where the CPU attends for {them}"
    return f"{chats} while {gpu} computes.{_alone(view)}"


def _single(view: LiveView) -> str:
    gpu, request = _gpu(view), view.requests[0]
    where = f"on {gpu}: nothing is offloaded"
    if request.tier.is_remote:
        where = f"on {request.tier}, which attends while {gpu} computes the rest"
    elif request.tier.in_host_memory:
        where = f"in main memory, where the CPU attends while {gpu} computes the rest"
    return f"1 chat: {_doing(request)}. Its memory is {where}."


def _doing(request: LiveRequest) -> str:
    if request.phase is Phase.PREFILLING:
        return f"its {request.num_tokens:,} tokens are being read"
    return "its answer is being written"


def _alone(view: LiveView) -> str:
    """Say what GPU memory alone would allow."""
    held, num = view.num_gpu_alone, len(view.requests)
    if held is None:
        return ""
    if held >= num:
        return " GPU memory alone would hold them, too." if num > 1 else ""
    return f" GPU memory alone would hold {held or 'none'}."


def _waiting(view: LiveView) -> str:
    num = view.stats.num_waiting
    wait = "1 more waits" if num == 1 else f"{num} more wait"
    if not view.requests:
        return "1 chat is about to begin." if num == 1 else f"{num} chats are about to begin."
    if not any(tier.in_host_memory for tier in view.stats.pools):
        return f"{wait} until there is room: the policy {view.stats.policy} leaves main memory unused."
    return f"{wait} for memory."


def _room(view: LiveView) -> str:
    gpu, cpu = (view.capacity_tokens(in_host) for in_host in (False, True))
    on_gpu, on_cpu = f"{gpu:,} tokens on {_gpu(view)}", f"{cpu:,} in main memory"
    if gpu and cpu:
        return f"There is room for {on_gpu} and {on_cpu}."
    return f"There is room for {on_gpu}." if gpu else f"There is room for {cpu:,} tokens in main memory."
