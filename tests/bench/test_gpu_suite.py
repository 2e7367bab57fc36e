"""The suite `gpu` sets decoding beside what its device allows, and says which device that was."""

import threading
from dataclasses import replace
from itertools import islice

import pytest
import torch
from fake_gpu import FLOP_PER_S, LAUNCH_S, READ_BYTES_PER_S, FakeNvml, FakeTimer
from matplotlib.figure import Figure

from neo_desktop.app.bench import computer
from neo_desktop.app.bench.gpu import rig, suite
from neo_desktop.app.bench.gpu.report import GpuReport, Measured, decode_figures, prefill_figures
from neo_desktop.app.bench.gpu.rig import Iteration, Rig, Work, iteration_work
from neo_desktop.app.bench.gpu.suite import GpuOptions, load_model, run_gpu, take_kv_memory
from neo_desktop.engine.batch import IterationPlan
from neo_desktop.engine.cuda.streams import WholeDevice
from neo_desktop.engine.engine import Engine
from neo_desktop.engine.execute.executor import Wait
from neo_desktop.engine.profiling import hardware
from neo_desktop.models.config import ModelConfig
from neo_desktop.models.linear.dense import Dense
from neo_desktop.models.shapes import shape
from neo_desktop.models.weights import named_weights

SMALL = GpuOptions(shape="tiny", device="cpu", batches=(1, 3), context_tokens=40, iterations=3, seconds=30.0)


def ignore(share: float, what: str) -> None:
    assert 0 <= share <= 1
    assert what


@pytest.fixture(scope="module")
def reports() -> list[GpuReport]:
    return first_round(SMALL)


def first_round(options: GpuOptions) -> list[GpuReport]:
    """Measure a prompt and each batch once; the rest of the time is not taken."""
    return list(islice(run_gpu(options, ignore), 1 + len(options.batches)))


def make_rig(options: GpuOptions) -> Rig:
    return Rig(take_kv_memory(load_model(options), options), options.context_tokens, options.seed)


def test_every_batch_is_measured_beside_its_limit(reports: list[GpuReport]) -> None:
    report = reports[-1]
    assert [row.batch for row in report.decode] == [1, 3]
    for row in report.decode:
        assert row.tokens_per_s.samples == row.step_ms.samples == row.outside_ms.samples == 3
        assert row.share == row.tokens_per_s.median / row.limit_tokens_per_s > 0
        longer = max(row.memory_limit_ms, row.arithmetic_limit_ms)
        assert row.limit_tokens_per_s == pytest.approx(row.batch / longer * 1e3)
        assert row.memory_limit_ms == pytest.approx(row.read_bytes / row.read_gb_per_s.median / 1e6, rel=1e-3)
        assert row.bound == ("memory" if row.memory_limit_ms == longer else "arithmetic")
        assert row.tokens_per_s.median == pytest.approx(row.batch / row.step_ms.median * 1e3)
        assert 0 < row.outside_ms.median < row.step_ms.median
        assert 0 <= row.idle_share < 1
        assert row.joules_per_token is None
        # All have the prompt, the token before and those that each step adds.
        assert SMALL.context_tokens < row.context_tokens <= SMALL.longest_tokens
    assert report.prefill.prompt_tokens == 40
    assert report.prefill.share == report.prefill.tokens_per_s.median / report.prefill.limit_tokens_per_s > 0
    assert report.process_bytes > 50e6


def test_there_is_a_report_after_each_measurement(reports: list[GpuReport]) -> None:
    assert [[row.batch for row in report.decode] for report in reports] == [[], [1], [1, 3]]
    for report in reports:
        section = report.section()
        assert section.summary
        assert all(len(row) == len(table.columns) for table in section.tables for row in table.rows)


def test_every_round_adds_to_every_batch() -> None:
    report = list(islice(run_gpu(SMALL, ignore), 6))[-1]
    assert report.rounds == 2
    assert report.prefill.tokens_per_s.samples == 2
    for row in report.decode:
        assert row.tokens_per_s.samples == 2 * SMALL.iterations
        assert row.read_gb_per_s.samples == 2 * 2  # before and after the iterations


def test_the_cpu_is_called_the_cpu(reports: list[GpuReport], monkeypatch: pytest.MonkeyPatch) -> None:
    section = reports[-1].section()
    assert section.title == "Model on the CPU"
    assert section.summary.startswith("The CPU was measured as the model's device, not a GPU.")
    assert any("'cpu' was asked for" in note for note in section.notes)
    assert any("not measured: no GPU" in row for table in section.tables for row in table.rows)
    assert all(metric.name.startswith("gpu.cpu.") for metric in reports[-1].metrics())
    names = [metric.name for metric in reports[-1].metrics()]
    assert len(set(names)) == len(names) == 7

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    notes = next(run_gpu(replace(SMALL, device="auto"), ignore)).notes
    assert any(note.startswith(f"No GPU that torch can use: {hardware.find_gpus()[1]}.") for note in notes)


def test_the_work_is_that_of_the_tensors() -> None:
    decoder = load_model(SMALL).decoder
    named = {weight.name: weight.dense() for weight in named_weights(decoder)}
    lm_head = named.pop("lm_head.weight")
    del named["model.embed_tokens.weight"]  # a few rows of it
    weights = sum(tensor.nbytes for tensor in (*named.values(), lm_head))
    kv_bytes = 2 * 2 * 2 * 16 * 4  # K and V, layers, heads, head_dim, fp32
    work = iteration_work(decoder.config, decoder.dtype, [10, 30], 2, 2)
    assert work.nbytes == weights + 40 * kv_bytes
    products = sum(tensor.numel() for tensor in (*named.values(), lm_head) if tensor.dim() == 2)
    assert work.operations == pytest.approx(2 * 2 * products, rel=0.01)
    chunk = iteration_work(decoder.config, decoder.dtype, [64], 64, 0)  # not the prompt's last one
    assert chunk.nbytes == weights - lm_head.nbytes + 64 * kv_bytes
    assert chunk.operations == pytest.approx(2 * 64 * (products - lm_head.numel()), rel=0.01)


def test_a_window_bounds_what_is_read_of_the_kv() -> None:
    config = replace(shape("tiny"), layer_windows=(None, 16))

    def kv_bytes(config: ModelConfig) -> int:
        with_kv, without = (iteration_work(config, torch.float16, lens, 1, 1).nbytes for lens in ([100], []))
        return with_kv - without

    assert kv_bytes(config) / kv_bytes(shape("tiny")) == (100 + 16) / 200


def test_tied_embeddings_are_read_once_and_others_row_by_row() -> None:
    tiny = shape("tiny")
    tied = replace(tiny, tie_word_embeddings=True)
    assert iteration_work(tied, torch.float32, [], 1, 1) == iteration_work(tiny, torch.float32, [], 1, 1)
    assert iteration_work(tied, torch.float32, [], 1, 1).nbytes == tied.weight_bytes(
        torch.float32, Dense(uses_tiles=False)
    )


def iteration(batch: int, work: Work, step_s: float, model_s: float) -> Iteration:
    return Iteration(batch, 100 * batch, batch, work, model_s, step_s)


def test_the_longer_of_the_two_times_is_the_limit() -> None:
    work = Work(nbytes=2_000_000_000, operations=80_000_000_000)
    steps = [iteration(8, work, 0.2 + delay, 0.19) for delay in (0.0, 0.05, 0.3)]
    measured = Measured(steps, [18.0, 20.0, 22.0], [0.1, 0.3, 0.2])
    row = decode_figures(8, measured, gflop_per_s=1000.0)
    assert (row.bound, row.memory_limit_ms, row.arithmetic_limit_ms) == ("memory", 100.0, 80.0)
    assert row.limit_tokens_per_s == pytest.approx(80.0)
    assert row.tokens_per_s.median == pytest.approx(8 / 0.25)
    assert row.share == pytest.approx(0.4)
    assert row.outside_ms.median == pytest.approx(60.0)
    assert (row.context_tokens, row.idle_share) == (100.0, 0.2)
    slow = decode_figures(8, measured, gflop_per_s=100.0)
    assert (slow.bound, slow.limit_tokens_per_s) == ("arithmetic", pytest.approx(10.0))


def test_energy_is_that_of_all_tokens_or_not_there() -> None:
    step = iteration(4, Work(1, 1), 0.1, 0.1)
    measured = Measured([step] * 10, [1.0], [0.0, 0.0], joules=[30.0, 50.0])
    assert decode_figures(4, measured, 1.0).joules_per_token == pytest.approx(80 / 40)
    measured.joules.pop()  # the counter was not there in one of the rounds
    assert decode_figures(4, measured, 1.0).joules_per_token is None


def test_every_chunk_of_a_prompt_has_a_limit_of_its_own() -> None:
    reads = Iteration(1, 64, 64, Work(1_000_000_000, 1), 0.0, 0.5)  # bound by memory: 0.1 s
    computes = Iteration(1, 128, 64, Work(1, 30_000_000_000), 0.0, 0.5)  # by arithmetic: 0.3 s
    figures = prefill_figures([[reads, computes]], read_gb_per_s=10.0, gflop_per_s=100.0)
    assert figures.prompt_tokens == 128
    assert figures.tokens_per_s.median == pytest.approx(128.0)
    assert figures.limit_tokens_per_s == pytest.approx(128 / 0.4)
    assert figures.bound == "arithmetic"


def test_iterations_that_count_are_decodes_of_the_whole_batch() -> None:
    options = replace(SMALL, batches=(2,))
    bench = make_rig(options)
    try:
        prompt = bench.prefill()
        assert sum(each.new_tokens for each in prompt) == 40
        bench.join(2)
        iterations = bench.decode(3)
        lengths = [each.context_tokens for each in iterations]
        assert [each.new_tokens for each in iterations] == [2, 2, 2]
        assert lengths == [lengths[0], lengths[0] + 2, lengths[0] + 4]
        assert all(each.step_s > each.model_s > 0 for each in iterations)
        assert 0 <= bench.idle_share(2) < 1
        assert bench.decode(1)[0].context_tokens == lengths[0] + 10  # traced ones decode, too
    finally:
        bench.close()


def test_prompts_of_a_batch_are_computed_once_and_fresh_ones_always() -> None:
    bench = make_rig(SMALL)
    try:
        computed = []
        for _ in range(3):
            fresh = sum(each.new_tokens for each in bench.prefill())
            bench.join(3)
            bench.leave()
            computed.append((fresh, bench._engine.stats().num_cached_tokens))
        assert [fresh for fresh, _ in computed] == [40, 40, 40]
        assert [cached for _, cached in computed] == [0, 3 * 32, 2 * 3 * 32]  # whole blocks
    finally:
        bench.close()


def test_ctrl_c_keeps_what_was_measured_and_ends_the_engine() -> None:
    kept: list[GpuReport] = []
    before = threading.active_count()

    def interrupt(share: float, what: str) -> None:
        if what == "decoding with batch 3":
            raise KeyboardInterrupt

    def measure() -> None:
        for report in run_gpu(SMALL, interrupt):
            kept.append(report)

    with pytest.raises(KeyboardInterrupt):
        measure()
    assert [row.batch for row in kept[-1].decode] == [1]
    assert kept[-1].section().plots
    assert threading.active_count() <= before


def test_an_engine_that_fails_is_an_error_and_not_a_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object, plan: IterationPlan) -> Wait:
        raise RuntimeError("out of order")

    monkeypatch.setattr(rig.Recorder, "start", fail)
    with pytest.raises(RuntimeError, match="out of order"):
        list(run_gpu(SMALL, ignore))


def test_a_batch_that_does_not_stay_together_is_an_error() -> None:
    bench = make_rig(SMALL)
    try:
        bench.join(3)
        bench._engine.abort("1")
        with pytest.raises(MemoryError, match="had to wait"):
            bench.decode(2)
    finally:
        bench.close()


def test_batches_without_room_for_their_kv_are_left_out() -> None:
    report = list(islice(run_gpu(replace(SMALL, gpu_cache_tokens=128), ignore), 2))[-1]
    assert [row.batch for row in report.decode] == [1]
    assert "Left out for want of memory for KV: batch 3." in report.section().notes
    with pytest.raises(MemoryError, match="does not fit"):
        next(run_gpu(replace(SMALL, gpu_cache_tokens=32), ignore))


def test_batches_whose_prompts_take_too_long_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Engine.step

    def slow(engine: Engine) -> object:
        # Not slept: the clock is moved.
        nonlocal late
        late += 1.0
        return step(engine)

    late = 0.0
    monkeypatch.setattr(Engine, "step", slow)
    clock = suite.time.perf_counter
    monkeypatch.setattr(suite.time, "perf_counter", lambda: clock() + late)
    report = list(run_gpu(replace(SMALL, seconds=1.5, batches=(1, 4, 64)), ignore))[-1]
    assert [row.batch for row in report.decode] == [1]
    (note,) = [note for note in report.notes if "want of time" in note]
    assert "batch 4, 64" in note


def test_a_context_that_the_model_does_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match="holds 4096: take shorter contexts"):
        next(run_gpu(replace(SMALL, context_tokens=4090), ignore))


def test_settings_without_effect_are_told() -> None:
    assert any(
        "CPU-cache" in note for note in next(run_gpu(replace(SMALL, cpu_cache_tokens=64), ignore)).notes
    )


def test_what_fits_into_a_cache_or_beats_the_limit_is_told(reports: list[GpuReport]) -> None:
    report = replace(reports[-1], last_level_cache_bytes=1 << 30)
    assert any("fit into the last-level cache" in note for note in report.section().notes)
    first, second = report.decode
    faster = replace(report, decode=(replace(first, share=1.2), replace(second, share=0.5)))
    assert any("More than the limit at batch 1:" in note for note in faster.section().notes)


def test_on_a_gpu_its_state_memory_and_energy_are_told(
    reports: list[GpuReport], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(computer, "pynvml", FakeNvml())
    monkeypatch.setattr(hardware, "pynvml", computer.pynvml)
    with computer.gpu_driver("12345678-aaaa-bbbb-cccc-1234567890ab") as driver:
        assert driver is not None
        state = driver.state()
        assert driver.energy_j() == 5000.0
        computer.pynvml.refuse = ("nvmlDeviceGetTotalEnergyConsumption",)
        assert driver.energy_j() is None
    assert computer.pynvml.num_open == 0
    row = replace(reports[-1].decode[0], joules_per_token=1.75)
    report = replace(reports[-1], device="cuda", peak_gpu_bytes=3 << 30, state=state, decode=(row,))
    section = report.section()
    assert not section.summary.startswith("The CPU")
    assert any("busy before the run (utilisation 43%)" in note for note in section.notes)
    assert any("3 GiB" in row for table in section.tables for row in table.rows)
    assert section.tables[0].columns[-1] == "J/token"
    assert section.tables[0].rows[0][-1] == "1.75"
    bare = replace(report, decode=reports[-1].decode).section()
    assert "J/token" not in bare.tables[0].columns
    assert any("Energy was not measured" in note for note in bare.notes)


def test_a_gpu_s_own_rates_come_from_its_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "CudaTimer", FakeTimer)
    gpu = suite.processor(WholeDevice(torch.device("cuda")), 8 << 30, torch.float16)
    assert gpu.name == "Fake RTX"
    most = 1 << 30  # more is not read at once
    assert gpu.read_gb_per_s(8 << 30) == pytest.approx(most / (LAUNCH_S + most / READ_BYTES_PER_S) / 1e9)
    assert gpu.read_gb_per_s(1000) == pytest.approx(1000 / (LAUNCH_S + 1000 / READ_BYTES_PER_S) / 1e9)
    assert gpu.matrix_gflop_per_s() == pytest.approx(FLOP_PER_S / 1e9, rel=0.01)


def test_the_plot_shows_every_batch_and_its_limit(reports: list[GpuReport]) -> None:
    (plot,) = reports[-1].section().plots
    figure = Figure(figsize=plot.inches)
    plot.draw(figure)
    (axes,) = figure.axes
    assert axes.get_xlabel()
    assert axes.get_ylabel() == "tokens per second"
    legend = axes.get_legend()
    assert legend is not None
    labels = sorted(text.get_text() for text in legend.get_texts())
    assert labels == ["decoded, and its share of the limit", "limit"]
    limit = axes.lines[0]
    assert list(limit.get_xdata()) == [1, 3]
    assert list(limit.get_ydata()) == [row.limit_tokens_per_s for row in reports[-1].decode]
    figure.canvas.draw()
