"""Under which addresses a server can be opened."""

import ipaddress
import socket

import psutil

_EVERYWHERE = ("0.0.0.0", "::")  # every address of this computer


def urls(host: str, port: int) -> list[str]:
    """Return the server's addresses: the one for this computer first, then those for others."""
    if host not in _EVERYWHERE:
        return [_url(host, port)]
    families = (socket.AF_INET,) if host == "0.0.0.0" else (socket.AF_INET, socket.AF_INET6)
    others = []
    states = psutil.net_if_stats()
    for name, addresses in psutil.net_if_addrs().items():
        is_up = name not in states or states[name].isup
        others += [entry.address for entry in addresses if is_up and entry.family in families]
    return [_url("127.0.0.1", port), *(_url(other, port) for other in sorted(filter(_is_reachable, others)))]


def _is_reachable(address: str) -> bool:
    ip = ipaddress.ip_address(address.partition("%")[0])
    return not (ip.is_loopback or ip.is_link_local or ip.is_unspecified)


def _url(host: str, port: int) -> str:
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
