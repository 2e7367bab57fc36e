"""What an engine is made from: each option, its default and what people are told of it, once.

The command line, the Python API, the self-test and the profiler read these same fields. Nothing heavy is
imported here: `neo-desktop --help` must not wait for torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Annotated, TypedDict, get_args, get_type_hints

from neo_desktop.engine.option_values import joined, stated

BUILTIN = "builtin"  # the model that comes with the program
MAX_BATCH_REQUESTS = 256
MOST = 2**53  # of any number: floats have all integers up to it
MAX_TOKEN_MS = 2000.0  # see `EngineOptions`
MAX_BATCH_TOKENS = {"cpu": 512, "cuda": 2048}  # a chunk of prefill must not hold decodes up for long


def most_requests(max_batch_tokens: int | None) -> int:
    """Return the default of `max_batch_requests`: each request has a token of an iteration at least."""
    return min(MAX_BATCH_REQUESTS, max_batch_tokens or MAX_BATCH_REQUESTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """What is said of an option, and what it may be."""

    help: str
    flag: str | None = None  # on the command line; None: there is none
    metavar: str | None = None
    least: float | None = None
    choices: tuple[str, ...] = ()
    is_list: bool = False  # text with commas, in Python a list, too
    panel: str = "Engine"  # of `--help`

    def check(self, name: str, value: object) -> None:
        """Check a value that was given.

        Raises:
            ValueError: it is none of the choices, too small or infinite.
        """
        if self.choices and value not in self.choices:
            raise ValueError(f"{name} {value!r} is unknown; choose one of: {', '.join(self.choices)}")
        if self.least is not None and isinstance(value, int | float) and not self.least <= value <= MOST:
            bound = f"at most {MOST}" if value > MOST else f"at least {self.least:g}"
            got = f"{value:g}" if isinstance(value, float) else str(value)
            raise ValueError(f"{name} must be {'finite' if value == inf else bound}, got {got}")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Which model, where it runs, and how much of the computer it may take.

    Raises ValueError for a value that does not exist or is out of range.
    """

    model: Annotated[
        str | Path, Option(help="Hugging Face checkpoint, GGUF file, or 'builtin'.", panel="Model")
    ] = BUILTIN
    shape: Annotated[
        str | None,
        Option(
            flag="--shape",
            help="Random weights in a published shape, e.g. llama-2-7b: to measure without a checkpoint.",
            panel="Model",
        ),
    ] = None
    policy: Annotated[
        str,
        Option(
            flag="--policy",
            choices=("auto", "neo", "apex", "pie", "fastdecode", "gpu-only"),
            help="Where requests may live: in GPU memory (gpu-only), in host memory (fastdecode), in both "
            "(neo, apex), or in both with the GPU attending to all, layer by layer (pie); auto does what is "
            "predicted to be fastest.",
        ),
    ] = "auto"
    device: Annotated[
        str,
        Option(flag="--device", choices=("auto", "cpu", "cuda"), help="Where the linear layers run."),
    ] = "auto"
    tensor_parallel: Annotated[
        int,
        Option(
            flag="--tensor-parallel",
            metavar="N",
            least=1,
            help="Divide the model among N GPUs of this computer, each with a process of its own; without a "
            "GPU, among N processes that share its CPUs.",
        ),
    ] = 1
    dtype: Annotated[
        str,
        Option(
            flag="--dtype",
            choices=("auto", "float32", "float16", "bfloat16"),
            help="Number format of weights and KV.",
        ),
    ] = "auto"
    weights_dtype: Annotated[
        str,
        Option(
            flag="--weights-dtype",
            choices=("auto", "float32", "float16", "bfloat16"),
            help="Number format of quantised weights in memory: as they are stored, where the device has "
            "a kernel for it (auto), or dequantised; it is then that of KV, too.",
        ),
    ] = "auto"
    gpu_cache_tokens: Annotated[
        int | None,
        Option(
            flag="--gpu-cache-tokens", least=0, help="Size of the GPU-cache in tokens; default: what fits."
        ),
    ] = None
    cpu_cache_tokens: Annotated[
        int | None,
        Option(
            flag="--cpu-cache-tokens", least=0, help="Size of the CPU-cache in tokens; default: what fits."
        ),
    ] = None
    swap_cache_tokens: Annotated[
        int | None,
        Option(
            flag="--swap-cache-tokens",
            least=0,
            help="Size of the swap-cache in tokens: KV in host memory that comes to the GPU layer by layer "
            "(pie, auto); default: what the GPU can attend to without waiting.",
        ),
    ] = None
    gpu_memory_gib: Annotated[
        float | None,
        Option(
            flag="--gpu-memory",
            metavar="GIB",
            least=0.001,
            help="The most GPU memory to take: weights, activations, KV and a reserve; without a GPU, KV of "
            "the imitated GPU-cache. Default: what is free.",
        ),
    ] = None
    gpu_weights_gib: Annotated[
        float | None,
        Option(
            flag="--gpu-weights",
            metavar="GIB",
            least=0.0001,
            help="The most GPU memory for weights: what is beyond it lives in host memory, and CPU and GPU "
            "compute it together. Default: all of them where they fit beside KV, else what is predicted to "
            "be fastest.",
        ),
    ] = None
    gpu_slice: Annotated[
        int | None,
        Option(
            flag="--gpu-slice",
            metavar="SMS",
            least=1,
            help="Use only so many of the GPU's multiprocessors, so that a big card can stand for a small "
            "one, together with --gpu-memory. Default: all.",
        ),
    ] = None
    cpu_memory_gib: Annotated[
        float | None,
        Option(
            flag="--cpu-memory",
            metavar="GIB",
            least=0.001,
            help="The most host memory to take for KV and transfers. Default: half of what is available.",
        ),
    ] = None
    host_reserve_gib: Annotated[
        float | None,
        Option(
            flag="--host-reserve",
            metavar="GIB",
            least=0,
            help="Host memory that is left to other programs: when less is available, the caches there "
            "become smaller, and larger again when there is plenty; 0: they keep what they have. Default: "
            "a tenth of the memory, at most 2.",
        ),
    ] = None
    cpu_cache_dtype: Annotated[
        str,
        Option(
            flag="--cpu-cache-dtype",
            choices=("auto", "int8"),
            help="Number format of KV in the CPU-cache: the model's own (auto), or 8 bits (int8): nearly "
            "twice the tokens of 16 bits in the same memory; answers may then differ slightly.",
        ),
    ] = "auto"
    workers: Annotated[
        str | None,
        Option(
            flag="--workers",
            metavar="HOST[:PORT],..|N",
            help="Attention workers that hold KV and attend to it, too: other computers on which "
            "'neo-desktop worker' runs; or how many of those that have joined with 'worker --connect'.",
            is_list=True,
            panel="Workers",
        ),
    ] = None
    worker_partition: Annotated[
        str,
        Option(
            flag="--worker-partition",
            choices=("requests", "heads"),
            help="What is divided among workers: requests, each of which lives on one of them; or the KV "
            "heads of all requests, so that all workers attend for each, and one that is lost loses all KV.",
            panel="Workers",
        ),
    ] = "requests"
    worker_secret: Annotated[
        Path | None,
        Option(
            flag="--worker-secret",
            metavar="FILE",
            help="What engine and workers know each other by: the same file on all computers. Default: what "
            "NEO_DESKTOP_WORKER_SECRET says, or ~/.config/neo-desktop/worker.secret.",
            panel="Workers",
        ),
    ] = None
    worker_ca: Annotated[
        Path | None,
        Option(
            flag="--worker-ca",
            metavar="FILE",
            help="Who signed the workers' certificates: connections are encrypted then. Default: nobody, "
            "and they are not.",
            panel="Workers",
        ),
    ] = None
    worker_timeout_s: Annotated[
        float,
        Option(
            flag="--worker-timeout",
            metavar="S",
            least=0.1,
            help="A worker that does not answer for so long is lost: its requests are computed again.",
            panel="Workers",
        ),
    ] = 10.0
    trace_timeline: Annotated[
        Path | None,
        Option(
            flag="--trace-timeline",
            metavar="FILE",
            help="Write who was busy when in every iteration, in Chrome's trace format (see it in Perfetto).",
        ),
    ] = None
    max_batch_tokens: Annotated[
        int | None, Option(least=1, help="Tokens of an iteration at most. Default: what suits the device.")
    ] = None
    max_batch_requests: Annotated[
        int | None,
        Option(
            least=1,
            help=f"Requests that run at the same time at most. Default: {MAX_BATCH_REQUESTS}, or the tokens "
            "of an iteration if those are fewer.",
        ),
    ] = None
    max_token_ms: Annotated[
        float,
        Option(
            flag="--max-token-ms",
            metavar="MS",
            least=0,
            help="Decodes of the CPU and of workers may take as long as this per token, as predicted, where "
            "going at their own pace brings more tokens per second in all; 0: they never do.",
        ),
    ] = MAX_TOKEN_MS

    def __post_init__(self) -> None:
        for name, option in OPTIONS.items():
            value = getattr(self, name)
            if option.is_list:
                value = joined(name, value)
            value = stated(name, _KINDS[name], value, option.choices)
            object.__setattr__(self, name, value)
            option.check(name, value)
        if self.weights_dtype not in ("auto", self.dtype) and self.dtype != "auto":
            raise ValueError(
                f"weights_dtype {self.weights_dtype!r} does not go with dtype {self.dtype!r}: leave one of "
                "them out"
            )
        if self.tensor_parallel > 1 and self.gpu_weights_gib is not None:
            raise ValueError("gpu_weights_gib does not go with tensor_parallel: leave one of them out")
        if self.tensor_parallel > 1 and self.workers is not None:
            raise ValueError("workers do not go with tensor_parallel: leave one of them out")

    @property
    def most_requests(self) -> int:
        """`max_batch_requests`, or its default beside the other options."""
        return self.max_batch_requests or most_requests(self.max_batch_tokens)


OPTIONS: dict[str, Option] = {
    name: annotation.__metadata__[0]
    for name, annotation in get_type_hints(EngineOptions, include_extras=True).items()
}

_KINDS = {name: get_args(kind) or (kind,) for name, kind in get_type_hints(EngineOptions).items()}


class EngineKeywords(TypedDict, total=False):
    """The fields of `EngineOptions` as keywords of a function, for type checkers.

    A test compares them: Python's users may pass more than the command line does.
    """

    shape: str | None
    policy: str
    device: str
    tensor_parallel: int
    dtype: str
    weights_dtype: str
    gpu_cache_tokens: int | None
    cpu_cache_tokens: int | None
    swap_cache_tokens: int | None
    gpu_memory_gib: float | None
    gpu_weights_gib: float | None
    gpu_slice: int | None
    cpu_memory_gib: float | None
    host_reserve_gib: float | None
    cpu_cache_dtype: str
    workers: str | int | Sequence[str] | Sequence[tuple[str, int]] | None
    worker_partition: str
    worker_secret: str | Path | None
    worker_ca: str | Path | None
    worker_timeout_s: float
    trace_timeline: str | Path | None
    max_batch_tokens: int | None
    max_batch_requests: int | None
    max_token_ms: float
