"""Options of an engine: type, default and help text, defined once.

Command line, Python API, self-test and profiler read the same fields. Heavy modules are not imported here:
`neo-desktop --help` must not wait for torch.
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from math import inf
from numbers import Real
from pathlib import Path
from types import NoneType
from typing import Any, cast, get_args, get_type_hints

BUILTIN = "builtin"  # the model that ships with the program
EVERYDAY = "Options"  # the first panel of `--help`
MODEL = "Model"
GIB = 1024**3
MAX_BATCH_REQUESTS = 256
MOST = 2**53  # limit for all numbers: floats represent every integer up to it
MAX_TOKEN_MS = 2000.0  # see `EngineOptions`
MAX_BATCH_TOKENS = {"cpu": 512, "cuda": 2048}  # long prefill chunks would delay decodes


def most_requests(max_batch_tokens: int | None) -> int:
    """Return the default of `max_batch_requests`: each request needs a token of the iteration."""
    return min(MAX_BATCH_REQUESTS, max_batch_tokens or MAX_BATCH_REQUESTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """Help text and valid values of an option."""

    help: str
    flag: str | None = None  # on the command line; None: no flag
    metavar: str | None = None
    least: float | None = None
    fixed_choices: tuple[str, ...] = ()
    choices_of: Callable[[], tuple[str, ...]] | None = None  # names them where they are registered
    panel: str = "Engine"  # of `--help`

    @property
    def choices(self) -> tuple[str, ...]:
        """All values, where only some are possible; empty: there is no list."""
        return self.fixed_choices if self.choices_of is None else self.choices_of()

    def check(self, name: str, value: object) -> None:
        """Validate a value.

        Raises:
            ValueError: it is not among the choices, is too small, or is infinite.
        """
        if self.choices and value not in self.choices:
            raise ValueError(f"{name} {value!r} is unknown; choose one of: {', '.join(self.choices)}")
        if self.least is not None and isinstance(value, int | float) and not self.least <= value <= MOST:
            bound = f"at most {MOST}" if value > MOST else f"at least {self.least:g}"
            got = f"{value:g}" if isinstance(value, float) else str(value)
            raise ValueError(f"{name} must be {'finite' if value == inf else bound}, got {got}")


def option(default: object, help: str, *, has_flag: bool = True, **named: Any) -> Any:  # noqa: A002
    """Return a field with an `Option`."""
    return field(default=default, metadata={"option": Option(help=help, **named), "has_flag": has_flag})


def policy_names() -> tuple[str, ...]:
    """Return every policy's name; imports numpy, for which `--help` must not wait."""
    from neo_desktop.engine.schedule.policies import POLICIES  # noqa: PLC0415

    return tuple(POLICIES)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Model, devices and resource limits of an engine.

    Raises ValueError for invalid values.
    """

    model: str | Path = option(
        BUILTIN, "Hugging Face checkpoint, GGUF file, or 'builtin'.", panel=MODEL, has_flag=False
    )
    shape: str | None = option(
        None, "Random weights in a published shape (llama-2-7b), to measure with.", panel=MODEL
    )
    mmproj: Path | None = option(
        None, "GGUF file of a GGUF model's vision tower; default: an mmproj*.gguf beside it.", panel=MODEL
    )
    policy: str = option(
        "auto",
        "Location of the KV cache: GPU memory (gpu-only), host memory (fastdecode), both "
        "(neo, apex), or both, with all attention on the GPU, layer by layer (pie); auto does what is "
        "predicted to be fastest.",
        metavar="NAME",
        choices_of=policy_names,
        panel=EVERYDAY,
    )
    device: str = option(
        "auto", "Device of the linear layers.", fixed_choices=("auto", "cpu", "cuda"), panel=EVERYDAY
    )
    tensor_parallel: int = option(
        1,
        "Divide the model among N GPUs of this computer, with one process per GPU; without a "
        "GPU, among N processes that share its CPUs.",
        metavar="N",
        least=1,
    )
    dtype: str = option(
        "auto", "Number format of weights and KV.", fixed_choices=("auto", "float32", "float16", "bfloat16")
    )
    longrope: str = option(
        "short",
        "Factors of models with LongRoPE (Phi-3, Phi-4-mini): those of short prompts, with the "
        "original context (4,096 tokens), or for all prompts those of long ones, with the whole context.",
        fixed_choices=("short", "long"),
        panel=MODEL,
    )
    weights_dtype: str = option(
        "auto",
        "Number format of quantised weights in memory: as stored, if the device has "
        "a kernel for it (auto), or dequantised to this format, which KV then uses as well. exact: as "
        "auto, but a GPU's kernels do not round the inputs of matmuls to 8 bits, which is slower.",
        fixed_choices=("auto", "exact", "float32", "float16", "bfloat16"),
    )
    gpu_cache_tokens: int | None = option(
        None, "Size of the GPU-cache in tokens; default: what fits.", least=0
    )
    cpu_cache_tokens: int | None = option(
        None, "Size of the CPU-cache in tokens; default: what fits.", least=0
    )
    swap_cache_tokens: int | None = option(
        None,
        "Size of the swap-cache in tokens: KV in host memory that is streamed to the GPU layer by "
        "layer (pie, auto); default: what the GPU can attend to without waiting.",
        least=0,
    )
    gpu_memory_gib: float | None = option(
        None,
        "Limit on GPU memory: weights, activations, KV and a reserve; without a GPU, KV of "
        "the imitated GPU-cache. Default: what is free.",
        metavar="GIB",
        least=0.001,
        panel=EVERYDAY,
    )
    gpu_weights_gib: float | None = option(
        None,
        "Limit on GPU memory for weights: CPU and GPU together compute the rest, in host memory. "
        "Default: all weights if they fit beside KV, otherwise what is predicted to be fastest.",
        metavar="GIB",
        least=0.0001,
    )
    move_experts: str = option(
        "auto",
        "Experts on the GPU change with use where that is predicted to pay (auto), or stay (off).",
        fixed_choices=("auto", "off"),
    )
    gpu_slice: int | None = option(
        None,
        "Use only this many of the GPU's multiprocessors, so that a big card can stand in for a "
        "small one, together with --gpu-memory. Default: all.",
        metavar="SMS",
        least=1,
    )
    cpu_memory_gib: float | None = option(
        None,
        "Limit on host memory for KV and transfers. Default: half of what is available.",
        metavar="GIB",
        least=0.001,
    )
    host_reserve_gib: float | None = option(
        None,
        "Host memory to leave to other programs: if less is available, the caches there "
        "shrink, and grow again later; 0: they keep their size. Default: "
        "a tenth of the memory, at most 2.",
        metavar="GIB",
        least=0,
    )
    disk_cache_gib: float | None = option(
        None,
        "Limit on KV on disk, for prompts that come back after their KV left the caches, or after a "
        "restart; 0: none. Default: 10, at most a tenth of the free space.",
        metavar="GIB",
        least=0,
    )
    cpu_cache_dtype: str = option(
        "auto",
        "Number format of KV in the CPU-cache: the model's own (auto), or 8 bits (int8): nearly "
        "twice the tokens of 16 bits in the same memory; answers may then differ slightly.",
        fixed_choices=("auto", "int8"),
    )
    workers: str | None = option(
        None,
        "Attention workers that hold KV and attend to it: other computers that run "
        "'neo-desktop worker'; or the number of workers to use that joined with 'worker --connect'.",
        metavar="HOST[:PORT],..|N",
        panel="Workers",
    )
    worker_secret: Path | None = option(
        None,
        "Shared secret of engine and workers: the same file on all computers. Default: "
        "NEO_DESKTOP_WORKER_SECRET, or ~/.config/neo-desktop/worker.secret.",
        metavar="FILE",
        panel="Workers",
    )
    worker_timeout_s: float = option(
        10.0,
        "Timeout after which a silent worker counts as lost; its requests are recomputed.",
        metavar="S",
        least=0.1,
        panel="Workers",
    )
    trace_timeline: Path | None = option(
        None,
        "Write a timeline of every iteration in Chrome's trace format (view it in Perfetto).",
        metavar="FILE",
    )
    max_batch_tokens: int | None = option(
        None, "Limit on tokens per iteration. Default: depends on the device.", least=1, has_flag=False
    )
    max_batch_requests: int | None = option(
        None,
        f"Limit on concurrent requests. Default: {MAX_BATCH_REQUESTS}, or the tokens "
        "of an iteration if those are fewer.",
        least=1,
        has_flag=False,
    )
    max_token_ms: float = option(
        MAX_TOKEN_MS,
        "Limit on the predicted time per token of async decodes, which the CPU and workers use if "
        "they raise total throughput; 0: no async decodes.",
        metavar="MS",
        least=0,
    )
    speculate: str = option(
        "auto",
        "Verify drafts of the next tokens, several at once, where that is predicted to be faster; "
        "texts stay the same. Sources: the request's text (ngram); the model's layer of multi-token "
        "prediction (mtp); --draft-model (draft); all that there are (auto).",
        fixed_choices=("auto", "off", "ngram", "mtp", "draft"),
    )
    draft_model: Path | None = option(
        None,
        "A smaller model with the same vocabulary, or the assistant of a Gemma 4 model, whose guesses at the "
        "next tokens the model verifies: a name from 'neo-desktop models list', a folder or a GGUF file.",
        metavar="NAME",
        panel=MODEL,
    )

    @property
    def keeps_weights(self) -> bool:
        """True if quantised weights stay as stored where the device has kernels for them."""
        return self.weights_dtype in ("auto", "exact")

    def __post_init__(self) -> None:
        for name, option in OPTIONS.items():
            value = stated(name, _KINDS[name], getattr(self, name), option.choices)
            object.__setattr__(self, name, value)
            option.check(name, value)
        if not self.keeps_weights and self.dtype not in ("auto", self.weights_dtype):
            raise ValueError(
                f"weights_dtype {self.weights_dtype!r} does not go with dtype {self.dtype!r}: leave one of "
                "them out"
            )
        if self.tensor_parallel > 1 and self.gpu_weights_gib is not None:
            raise ValueError("gpu_weights_gib does not go with tensor_parallel: leave one of them out")
        if self.tensor_parallel > 1 and self.workers is not None:
            raise ValueError("workers do not go with tensor_parallel: leave one of them out")
        if self.speculate == "draft" and self.draft_model is None:
            raise ValueError("speculate 'draft' needs a draft_model: name a small model, or choose 'auto'")
        if (trace := self.trace_timeline) is not None and (trace.is_dir() or not trace.parent.is_dir()):
            reason = f"{trace} is a folder" if trace.is_dir() else f"there is no folder {trace.parent}"
            raise ValueError(f"trace_timeline needs the name of a file, but {reason}: choose another one")
        others = {
            f"speculate {self.speculate!r}": self.speculate not in ("auto", "draft"),
            "shape": self.shape is not None,
            "tensor_parallel": self.tensor_parallel > 1,
        }
        for other, is_given in others.items():
            if self.draft_model is not None and is_given:
                raise ValueError(f"draft_model does not go with {other}: leave one of them out")

    @property
    def gpu_memory_bytes(self) -> int | None:
        """Limit on GPU memory: weights, activations, KV and reserve; without a GPU: KV of the GPU-cache."""
        return None if self.gpu_memory_gib is None else int(self.gpu_memory_gib * GIB)

    @property
    def cpu_memory_bytes(self) -> int | None:
        """Limit on KV in host memory, and transfer buffers; ranks share host memory."""
        return None if self.cpu_memory_gib is None else int(self.cpu_memory_gib * GIB) // self.tensor_parallel

    @property
    def most_requests(self) -> int:
        return self.max_batch_requests or most_requests(self.max_batch_tokens)


def stated(name: str, kinds: tuple[type, ...], value: object, choices: tuple[str, ...] = ()) -> Any:
    """Return a value in one of the types of its option, which the error names.

    Args:
        choices: valid texts; `torch.float16` names "float16".
    """
    if value is None and NoneType in kinds:
        return None
    if choices and not isinstance(value, str):
        return str(value).removeprefix("torch.")
    for kind, convert, _ in _CONVERTERS:
        if kind in kinds:
            try:
                return convert(value)
            except (TypeError, ValueError):
                continue
    wanted = " or ".join(words for kind, _, words in _CONVERTERS if kind in kinds)
    raise ValueError(f"{name} must be {wanted}, got {value!r}")


def _text(value: object) -> str:
    if isinstance(value, int) and not isinstance(value, bool):  # a number of workers
        return str(value)
    if not isinstance(value, str):
        raise TypeError
    return value


def _whole(value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError
    return int(value) if isinstance(value, float) and value.is_integer() else operator.index(value)


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError
    try:
        return float(value)
    except OverflowError:
        return float("inf") if cast("Any", value) > 0 else float("-inf")


# (type of an option, converter, words for the error); the first match is used.
_CONVERTERS: tuple[tuple[type, Callable[[Any], object], str], ...] = (
    (str, _text, "text"),
    (Path, Path, "a path"),
    (int, _whole, "a whole number"),
    (float, _number, "a number"),
)


def _flag(name: str) -> str:
    """Return the flag of an option: its name without the unit."""
    return "--" + name.removesuffix("_gib").removesuffix("_s").replace("_", "-")


OPTIONS: dict[str, Option] = {
    each.name: replace(each.metadata["option"], flag=_flag(each.name) if each.metadata["has_flag"] else None)
    for each in fields(EngineOptions)
}

_KINDS = {name: get_args(kind) or (kind,) for name, kind in get_type_hints(EngineOptions).items()}
