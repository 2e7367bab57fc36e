"""The addresses that a server prints for users to open."""

import socket
from collections import namedtuple

import psutil
import pytest

from neo_desktop.app.web.server import urls

Address = namedtuple("Address", "family address")
State = namedtuple("State", "isup")


@pytest.fixture(autouse=True)
def network(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = {
        "lo": [Address(socket.AF_INET, "127.0.0.1"), Address(socket.AF_INET6, "::1")],
        "wlan0": [
            Address(socket.AF_INET, "192.168.1.5"),
            Address(socket.AF_INET6, "fe80::1%wlan0"),
            Address(socket.AF_INET6, "fd00::5"),
        ],
        "eth0": [Address(socket.AF_INET, "10.0.0.2")],
        "eth1": [Address(socket.AF_INET, "169.254.3.3")],
    }
    states = {"lo": State(True), "wlan0": State(True), "eth0": State(False), "eth1": State(True)}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: addresses)
    monkeypatch.setattr(psutil, "net_if_stats", lambda: states)


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", ["http://127.0.0.1:80"]),
        ("::1", ["http://[::1]:80"]),
        ("192.168.1.5", ["http://192.168.1.5:80"]),
        ("0.0.0.0", ["http://127.0.0.1:80", "http://192.168.1.5:80"]),
        ("::", ["http://127.0.0.1:80", "http://192.168.1.5:80", "http://[fd00::5]:80"]),
    ],
)
def test_a_server_for_all_names_the_addresses_that_others_can_open(host: str, expected: list[str]) -> None:
    assert urls(host, 80) == expected
