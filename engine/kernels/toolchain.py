"""Whether Triton's kernels can be compiled here: found before the first of them is, not by its failure."""

from importlib.util import find_spec

from neo_desktop.engine.ladder import ladder

KERNELS = ("paged_decode", "rope_append", "norm", "activation", "row_copy")  # of the ladder


def limit_kernels() -> None:
    """Let torch's operators serve for all kernels if Triton cannot; to be called before kernels are used."""
    if any(ladder.rung(kernel) == "triton" for kernel in KERNELS) and (obstacle := find_obstacle()):
        ladder.limit_all(KERNELS, "torch", obstacle)


def find_obstacle() -> str | None:
    """Return why Triton cannot compile kernels, and what to install; None: it should be able to."""
    if find_spec("triton") is None:
        return (
            "Triton is not installed, which is faster: 'pip install triton', on Windows "
            "'pip install triton-windows'"
        )
    return None
