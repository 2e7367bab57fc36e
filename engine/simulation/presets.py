"""Machines by name."""

from difflib import get_close_matches

from neo_desktop.engine.simulation.gpus import GPUS
from neo_desktop.engine.simulation.hosts import HOSTS
from neo_desktop.engine.simulation.machine import GB, GIB, TFLOPS, GpuPreset, HostPreset

__all__ = ["GB", "GIB", "GPUS", "HOSTS", "TFLOPS", "GpuPreset", "HostPreset", "get_gpu", "get_host"]


def get_gpu(name: str) -> GpuPreset:
    """Return the GPU with that name, in any common spelling: "RTX 3060 12GB", "4090", "GeForce RTX 4060 Ti".

    Raises:
        ValueError: unknown name; the message lists the valid ones.
    """
    plain = _plain(name).removeprefix("nvidia").removeprefix("geforce")
    gpu = GPUS.get(_ALIASES.get(plain, name.lower()))
    if gpu is None:
        raise ValueError(f"no GPU preset is called {name!r}{_instead(name.lower(), list(GPUS))}")
    return gpu


def get_host(name: str) -> HostPreset:
    """Return the host with that name; ValueError lists the valid names."""
    host = HOSTS.get(name.lower())
    if host is None:
        raise ValueError(f"no host preset is called {name!r}{_instead(name.lower(), list(HOSTS))}")
    return host


def _instead(name: str, names: list[str]) -> str:
    near = get_close_matches(name, names, n=1)
    meant = f" (did you mean {near[0]}?)" if near else ""
    return f"{meant}: choose one of {', '.join(names)}"


def _plain(name: str) -> str:
    """Return the name in lower case without spaces and dashes."""
    return "".join(character for character in name.lower() if character.isalnum())


_ALIASES = (
    {_plain(name).removeprefix("rtx").removeprefix("gtx"): name for name in GPUS}
    | {_plain(name): name for name in GPUS}
    | {
        "rtx306012gb": "rtx-3060",
        "rtx4060ti": "rtx-4060-ti-16gb",
        "rtx5060ti": "rtx-5060-ti-16gb",
        "a100": "a100-80gb",
        "h100sxm": "h100",
    }
)
