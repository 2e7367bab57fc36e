"""Pytest plugin: kernels' tests run as compiled for the GPU of `PTX_CAPABILITY`; set `TRITON_INTERPRET=0`.

    TRITON_INTERPRET=0 TRITON_CACHE_DIR=/tmp/ptx PTX_CAPABILITY=86 PYTHONPATH=tests/support \\
        python -m pytest -n 0 -p ptx.plugin -k "not torch" tests/kernels/test_elementwise.py

At the end it prints a line of JSON: kernel → launches.
"""

import json
import os

import pytest

from .driver import ImitatedGPU

gpu = ImitatedGPU(int(os.environ["PTX_CAPABILITY"]), int(os.environ.get("PTX_SEED", "0")))


def pytest_configure() -> None:
    gpu.install()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items[:] = [
        item
        for item in items
        if not isinstance(item, pytest.Function)
        or getattr(item, "callspec", None) is None
        or item.callspec.params.get("kernel_level") != "torch"
    ]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line(f"launches: {json.dumps(gpu.launches)}")
