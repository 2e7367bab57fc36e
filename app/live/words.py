"""In plain words: what offloading does right now."""

from collections.abc import Iterator

from neo_desktop.app.llamacpp.choice import LLAMACPP_NOTE
from neo_desktop.engine.live import LiveView
from neo_desktop.engine.stats import LLAMACPP

IMITATED = "neo-desktop uses no GPU on this computer: the GPU's part is imitated on the CPU."


def sentence(view: LiveView) -> str:
    """Say where the memory of chats is, and what GPU memory alone would allow."""
    num, num_waiting = len(view.requests), view.stats.num_waiting
    if num + num_waiting == 0:
        return f"No chat is waiting for an answer. {_room(view)}"
    parts = []
    if num and view.stats.backend == LLAMACPP:
        parts.append("1 chat is being answered.")
    elif num:
        parts += _running(view)
    if num_waiting:
        parts.append(f"{_chats(num_waiting)} {'waits' if num_waiting == 1 else 'wait'} for room.")
    if behind := sum(request.is_held for request in view.requests):
        parts.append(f"The CPU has more to do than fits beside the GPU's work: {_chats(behind)} must wait.")
    return " ".join(parts)


def _running(view: LiveView) -> Iterator[str]:
    num, num_alone = len(view.requests), view.num_gpu_alone
    num_workers = sum(request.tier.is_remote for request in view.requests)
    num_cpu = sum(request.tier.in_host_memory for request in view.requests) - num_workers
    places = {
        f"on {_gpu(view)}": num - num_cpu - num_workers,
        "in main memory, where the CPU attends": num_cpu,
        "on workers, which attend": num_workers,
    }
    where = ", ".join(f"{count} {place}" for place, count in places.items() if count)
    yield f"{_chats(num)} at once: {where}." if num > 1 else f"1 chat: {where.removeprefix('1 ')}."
    if not num_cpu and not num_workers:
        yield "Nothing is offloaded."
    elif num_alone is not None and num_alone < num:
        yield f"GPU memory alone would hold {num_alone or 'none'}."
    elif num_alone is not None:
        yield "GPU memory alone would hold all."


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
    said = []
    for tier, state in view.workers.items():
        num = sum(request.tier == tier for request in view.requests)
        tokens = view.stats.pools[tier].num_blocks * view.stats.block_size
        does = f"attends for {_chats(num)}" if num else "is there"
        state_now = f"{does}; it has room for {tokens:,} tokens"
        if state.lost is not None:
            again = "its chats are computed again elsewhere, and it is used again as soon as it answers"
            state_now = f"is lost ({state.lost}): {again}"
        said.append(f"{tier} at {state.address} {state_now}.")
    return said


def _chats(count: int) -> str:
    return f"{count} chat{'s' * (count != 1)}"


def _gpu(view: LiveView) -> str:
    return "the imitated GPU" if view.is_gpu_imitated else "the GPU"


def _room(view: LiveView) -> str:
    gpu, cpu = (view.capacity_tokens(in_host) for in_host in (False, True))
    on_gpu, on_cpu = f"{gpu:,} tokens on {_gpu(view)}", f"{cpu:,} in main memory"
    if gpu and cpu:
        return f"There is room for {on_gpu} and {on_cpu}."
    return f"There is room for {on_gpu}." if gpu else f"There is room for {cpu:,} tokens in main memory."
