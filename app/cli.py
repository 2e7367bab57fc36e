"""The command line: `neo-desktop [chat] | serve | bench | profile | simulate | info`."""

import json
import os
import sys
import webbrowser
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from neo_desktop.app import options as opt
from neo_desktop.app.bench_command import EXAMPLES, bench
from neo_desktop.app.terminal import progress_bar, set_up_logging, stderr, stdout

if TYPE_CHECKING:
    from neo_desktop import Engine

DEFAULT_COMMAND = "chat"


app = typer.Typer(
    name="neo-desktop",
    help="Run large language models beyond what your GPU's memory should allow, at full accuracy.",
    epilog="Without a command, the chat opens in your browser.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)


def main() -> None:
    """Run the command line: exit code 0 for success, 1 for failure, 2 for wrong use."""
    arguments = sys.argv[1:]
    # `neo-desktop --port 9000` means `neo-desktop chat --port 9000`.
    if not arguments or (arguments[0].startswith("-") and arguments[0] not in ("--help", "-h", "--version")):
        arguments = [DEFAULT_COMMAND, *arguments]
    try:
        app(arguments)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        if "--debug" in arguments:
            raise
        # Errors that a person can mend have a sentence of ours; anything else at least gets its name.
        is_expected = isinstance(error, ValueError | MemoryError | OSError | RuntimeError)
        text = str(error) if is_expected else f"{type(error).__name__}: {error}"
        stderr.print(f"[bold red]error:[/] {escape(text)}", highlight=False, soft_wrap=True)
        sys.exit(1)


def _print_version(wanted: bool) -> None:
    if wanted:
        from neo_desktop import __version__

        stdout.print(f"neo-desktop {__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Hold the options that stand before a command."""


@app.command(epilog="Example: neo-desktop chat --model ~/models/Llama-3.2-1B-Instruct")
def chat(
    model: opt.Model = opt.DEFAULT_MODEL,
    host: opt.Host = opt.DEFAULT_HOST,
    port: opt.Port = opt.DEFAULT_PORT,
    browser: Annotated[
        bool, typer.Option("--browser/--no-browser", help="Open the page in the default browser.")
    ] = True,
    api_key: opt.ApiKey = None,
    allowed_hosts: opt.AllowedHosts = None,
    policy: opt.PolicyOption = opt.PolicyName.AUTO,
    device: opt.DeviceOption = opt.Device.AUTO,
    dtype: opt.DtypeOption = opt.Dtype.AUTO,
    gpu_cache_tokens: opt.GpuCacheTokens = None,
    cpu_cache_tokens: opt.CpuCacheTokens = None,
    gpu_memory: opt.GpuMemory = None,
    gpu_slice: opt.GpuSlice = None,
    cpu_memory: opt.CpuMemory = None,
    cpu_cache_dtype: opt.CpuCacheDtypeOption = opt.CpuCacheDtype.AUTO,
    shape: opt.Shape = None,
    trace_timeline: opt.TraceTimeline = None,
    debug: opt.Debug = False,
) -> None:
    """Open the chat in a browser; the same port serves the OpenAI-compatible API."""
    _serve(
        _ServerSettings(host, port, api_key, allowed_hosts or [], with_page=True, open_browser=browser),
        _EngineSettings(
            model=model,
            shape=shape,
            device=device,
            dtype=dtype,
            gpu_cache_tokens=gpu_cache_tokens,
            cpu_cache_tokens=cpu_cache_tokens,
            gpu_memory_gib=gpu_memory,
            gpu_slice=gpu_slice,
            cpu_memory_gib=cpu_memory,
            cpu_cache_dtype=cpu_cache_dtype,
            policy=policy,
            trace_timeline=trace_timeline,
        ),
        debug,
    )


@app.command(epilog="Example: neo-desktop serve --model ~/models/Qwen3-8B --port 9000")
def serve(
    model: opt.Model = opt.DEFAULT_MODEL,
    host: opt.Host = opt.DEFAULT_HOST,
    port: opt.Port = opt.DEFAULT_PORT,
    api_key: opt.ApiKey = None,
    allowed_hosts: opt.AllowedHosts = None,
    policy: opt.PolicyOption = opt.PolicyName.AUTO,
    device: opt.DeviceOption = opt.Device.AUTO,
    dtype: opt.DtypeOption = opt.Dtype.AUTO,
    gpu_cache_tokens: opt.GpuCacheTokens = None,
    cpu_cache_tokens: opt.CpuCacheTokens = None,
    gpu_memory: opt.GpuMemory = None,
    gpu_slice: opt.GpuSlice = None,
    cpu_memory: opt.CpuMemory = None,
    cpu_cache_dtype: opt.CpuCacheDtypeOption = opt.CpuCacheDtype.AUTO,
    shape: opt.Shape = None,
    trace_timeline: opt.TraceTimeline = None,
    debug: opt.Debug = False,
) -> None:
    """Serve the OpenAI-compatible API without the page."""
    _serve(
        _ServerSettings(host, port, api_key, allowed_hosts or [], with_page=False, open_browser=False),
        _EngineSettings(
            model=model,
            shape=shape,
            device=device,
            dtype=dtype,
            gpu_cache_tokens=gpu_cache_tokens,
            cpu_cache_tokens=cpu_cache_tokens,
            gpu_memory_gib=gpu_memory,
            gpu_slice=gpu_slice,
            cpu_memory_gib=cpu_memory,
            cpu_cache_dtype=cpu_cache_dtype,
            policy=policy,
            trace_timeline=trace_timeline,
        ),
        debug,
    )


@app.command(epilog="Example: neo-desktop info --json machine.json")
def info(json_file: opt.JsonFile = None, debug: opt.Debug = False) -> None:
    """Show this computer's hardware, the versions in use and where things are."""
    set_up_logging(debug)
    from neo_desktop.app.machine_table import print_machine
    from neo_desktop.engine.profiling.hardware import machine_info

    machine = machine_info()
    print_machine(machine, stdout)
    if json_file is not None:
        json_file.write_text(json.dumps(asdict(machine), indent=2) + "\n", encoding="utf-8")


app.command(name="bench", epilog=EXAMPLES)(bench)


@app.command(epilog="Example: neo-desktop profile --shape llama-3.2-1b --json tables.json")
def profile(
    model: opt.Model = opt.DEFAULT_MODEL,
    shape: opt.Shape = None,
    device: opt.DeviceOption = opt.Device.AUTO,
    dtype: opt.DtypeOption = opt.Dtype.AUTO,
    gpu_cache_tokens: opt.GpuCacheTokens = None,
    cpu_cache_tokens: opt.CpuCacheTokens = None,
    gpu_memory: opt.GpuMemory = None,
    gpu_slice: opt.GpuSlice = None,
    cpu_memory: opt.CpuMemory = None,
    cpu_cache_dtype: opt.CpuCacheDtypeOption = opt.CpuCacheDtype.AUTO,
    refresh: Annotated[
        bool, typer.Option("--refresh", help="Measure again, even if tables are there.")
    ] = False,
    json_file: opt.JsonFile = None,
    debug: opt.Debug = False,
) -> None:
    """Show how long the parts of an iteration take here; the first time, measure them."""
    set_up_logging(debug)
    from neo_desktop.app.profile import ProfileOptions, run_profile

    options = ProfileOptions(
        model=model,
        shape=shape,
        device=device.value,
        dtype=dtype.value,
        gpu_cache_tokens=gpu_cache_tokens,
        cpu_cache_tokens=cpu_cache_tokens,
        gpu_memory_gib=gpu_memory,
        gpu_slice=gpu_slice,
        cpu_memory_gib=cpu_memory,
        cpu_cache_dtype=cpu_cache_dtype.value,
        refresh=refresh,
    )
    with progress_bar() as progress:
        task = progress.add_task("Loading weights", total=1.0)
        report = run_profile(
            options, lambda share, what: progress.update(task, completed=share, description=what)
        )
    report.print(stdout)
    if json_file is not None:
        report.write_json(json_file)


@app.command(
    epilog="Examples:\n\n"
    "neo-desktop simulate --gpu t4 --model llama-2-7b --trace osc.json --rate 2 --json report.json\n\n"
    "neo-desktop simulate --gpu a10g --cpu g5.16xlarge --model llama-3.1-8b --input 1000 --output 200\n\n"
    "neo-desktop simulate --tables tables.json --gpu-cache-tokens 3000 --cpu-cache-tokens 60000 "
    "--trace conv.csv"
)
def simulate(
    gpu: opt.SimulatedGpu = None,
    cpu: opt.SimulatedCpu = None,
    tables: opt.Tables = None,
    model: opt.SimulatedModel = "llama-2-7b",
    dtype: opt.SimulatedDtype = opt.SimulatedDtypeName.FLOAT16,
    gpu_cache_tokens: opt.GpuCacheTokens = None,
    cpu_cache_tokens: opt.CpuCacheTokens = None,
    trace: opt.Trace = None,
    input_tokens: opt.InputTokens = None,
    output_tokens: opt.OutputTokens = None,
    num_requests: opt.NumRequests = None,
    rate: opt.Rate = None,
    seed: opt.Seed = 0,
    policy: opt.SimulatedPolicy = None,
    max_context_tokens: opt.MaxContextTokens = None,
    max_batch_tokens: opt.MaxBatchTokens = 2048,
    max_batch_requests: opt.MaxBatchRequests = 256,
    gpu_slowdown: opt.GpuSlowdown = 1.0,
    cpu_slowdown: opt.CpuSlowdown = 1.0,
    noise: opt.Noise = 0.0,
    json_file: opt.JsonFile = None,
    debug: opt.Debug = False,
) -> None:
    """Run a workload on a virtual clock: what each policy would bring on a machine that you need not own."""
    set_up_logging(debug)
    from neo_desktop.app.simulate import SimulationOptions, UsageError, run_simulation

    options = SimulationOptions(
        gpu=gpu,
        cpu=cpu,
        tables=tables,
        model=model,
        dtype=dtype.value,
        trace=trace,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        num_requests=num_requests,
        rate=rate,
        seed=seed,
        policy=policy,
        gpu_cache_tokens=gpu_cache_tokens,
        cpu_cache_tokens=cpu_cache_tokens,
        max_context_tokens=max_context_tokens,
        max_batch_tokens=max_batch_tokens,
        max_batch_requests=max_batch_requests,
        gpu_slowdown=gpu_slowdown,
        cpu_slowdown=cpu_slowdown,
        noise=noise,
    )
    try:
        with progress_bar() as progress:
            task = progress.add_task("Simulating", total=1.0)
            report = run_simulation(
                options, lambda share, what: progress.update(task, completed=share, description=what)
            )
    except UsageError as error:
        raise typer.BadParameter(str(error)) from None
    if json_file is not None:
        report.write_json(json_file)
    report.print(stdout)


@dataclass(frozen=True, slots=True)
class _EngineSettings:
    model: str
    shape: str | None
    device: opt.Device
    dtype: opt.Dtype
    gpu_cache_tokens: int | None
    cpu_cache_tokens: int | None
    gpu_memory_gib: float | None
    gpu_slice: int | None
    cpu_memory_gib: float | None
    cpu_cache_dtype: opt.CpuCacheDtype
    policy: opt.PolicyName
    trace_timeline: Path | None


@dataclass(frozen=True, slots=True)
class _ServerSettings:
    host: str
    port: int
    api_key: str | None
    allowed_hosts: list[str]
    with_page: bool
    open_browser: bool


def _serve(server: _ServerSettings, engine: _EngineSettings, debug: bool) -> None:
    """Claim the port, load the model, serve until Ctrl-C."""
    set_up_logging(debug)
    from neo_desktop.app.security import check_bind
    from neo_desktop.app.server import claim_port, create_app
    from neo_desktop.app.server import serve as serve_app
    from neo_desktop.app.service import EngineService

    try:
        check_bind(server.host, server.api_key)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--host") from None
    # First the port: to find it busy after minutes of loading would be a poor joke.
    with claim_port(server.host, server.port) as socket, _load_engine(engine) as loaded:
        host = server.host if server.host not in ("0.0.0.0", "::") else "127.0.0.1"
        url = f"http://{f'[{host}]' if ':' in host else host}:{socket.getsockname()[1]}"
        web_app = create_app(
            EngineService(loaded), api_key=server.api_key, allowed_hosts=server.allowed_hosts
        )
        if server.with_page:
            from neo_desktop.ui.app import mount

            mount(web_app, base_url=f"{url}/v1", api_key=server.api_key)

        def announce() -> None:
            if server.with_page:
                stdout.print(f"Chat:  [bold]{url}[/]", highlight=False)
            stdout.print(f"API:   [bold]{url}/v1[/]  (model {loaded.model_name})", highlight=False)
            if engine.cpu_cache_dtype is opt.CpuCacheDtype.INT8:
                stdout.print("CPU-cache in 8 bits: answers may differ slightly.", highlight=False)
            if loaded.streams.note is not None:
                stdout.print(loaded.streams.note, highlight=False)
            stdout.print("Ctrl-C ends the program.", highlight=False)
            if server.open_browser and _has_screen():
                webbrowser.open(url)

        serve_app(web_app, socket, announce)
    stdout.print("Stopped.")


def _load_engine(settings: _EngineSettings) -> "Engine":
    from neo_desktop import Engine

    with progress_bar() as progress:
        loading = progress.add_task("Loading weights", total=None)
        measuring = progress.add_task("Measuring this computer", total=1.0, visible=False)

        def measured(share: float, what: str) -> None:
            text = f"Measuring this computer: {what}"
            progress.update(measuring, visible=True, completed=share, description=text)

        return Engine.from_pretrained(
            settings.model,
            shape=settings.shape,
            device=settings.device.value,
            dtype=settings.dtype.value,
            policy=settings.policy.value,
            gpu_cache_tokens=settings.gpu_cache_tokens,
            cpu_cache_tokens=settings.cpu_cache_tokens,
            gpu_memory_gib=settings.gpu_memory_gib,
            gpu_slice=settings.gpu_slice,
            cpu_memory_gib=settings.cpu_memory_gib,
            cpu_cache_dtype=settings.cpu_cache_dtype.value,
            trace_timeline=settings.trace_timeline,
            progress=lambda done, total: progress.update(loading, completed=done, total=total),
            profile_progress=measured,
        )


def _has_screen() -> bool:
    """Without one, Python would open a text browser in this terminal."""
    return sys.platform != "linux" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


if __name__ == "__main__":
    main()
