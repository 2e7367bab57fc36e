"""Weight formats on a GPU."""

from neo_desktop.engine.cuda.pinned import mapped_bytes
from neo_desktop.engine.fallbacks import fallbacks
from neo_desktop.engine.kernels import dispatch
from neo_desktop.models.linear.dense import Dense


def gpu_form(form: Dense) -> Dense:
    """Return a format with kernels for packed matrices; tables are in host memory if that is pinned."""
    return form.on_gpu(dispatch, mapped_bytes if fallbacks.level("host_memory") == "pinned" else None)
