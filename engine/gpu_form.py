"""Weight formats on a GPU."""

from functools import partial

from neo_desktop.engine.cuda.pinned import weight_bytes
from neo_desktop.engine.fallbacks import fallbacks
from neo_desktop.engine.kernels import dispatch
from neo_desktop.models.linear.dense import Dense
from neo_desktop.models.linear.host_table import HostTables

_TABLES = HostTables(partial(weight_bytes, must_pin=True), dispatch)


def gpu_form(form: Dense) -> Dense:
    """Return a format with kernels for packed matrices; tables are in host memory if that is pinned."""
    return form.on_gpu(dispatch, _TABLES if fallbacks.level("host_memory") == "pinned" else None)
