"""Datasheet model of weights divided between GPU and host memory, or among experts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch

from neo_desktop.engine.predict.cost_model import Curve
from neo_desktop.engine.predict.offloaded_matmul import Rates, Sizes
from neo_desktop.engine.predict.weight_plan import (
    WeightPlan,
    bound_ms,
    layer_matrices,
    weight_times,
)
from neo_desktop.engine.simulation.presets import GpuPreset, HostPreset
from neo_desktop.models.config import ModelConfig
from neo_desktop.models.linear.protocol import WeightFormat

OFFLOAD_MS = 0.022  # GPU -> CPU -> GPU by stream memory operations, measured on an H200
CPU_CALL_MS = 0.005  # waking the pool's threads
ROWS_STEP = 1.1  # ratio of consecutive points of a curve


def machine_rates(gpu: GpuPreset, host: HostPreset, config: ModelConfig) -> Rates:
    """Return matmul rates for a model. CPU and bus together get the bandwidth of host memory's channels."""
    return Rates(
        cpu_bytes_per_s=host.weights_bytes_per_s(experts=config.experts is not None),
        cpu_flops=host.attention_flops,
        bus_bytes_per_s=gpu.bus_bytes_per_s * gpu.bus_share,
        gpu_bytes_per_s=gpu.memory_bytes_per_s * gpu.streaming_share,
        gpu_flops=gpu.tensor_flops * gpu.matmul_share,
        offload_ms=OFFLOAD_MS + CPU_CALL_MS,
        host_bytes_per_s=host.memory_bytes_per_s * host.read_share,
    )


@dataclass(frozen=True, slots=True, eq=False)
class DividedWeights:
    """Divided weights of one model on one machine."""

    matrices: Mapping[str, Sizes]  # in all layers
    plan: WeightPlan
    rates: Rates

    @classmethod
    def of(
        cls,
        plan: WeightPlan | None,
        rates: Rates,
        config: ModelConfig,
        form: WeightFormat,
        dtype: torch.dtype,
    ) -> Self | None:
        """Return a model's divided weights; None: each matmul reads all weights, on the GPU.

        Args:
            plan: None: all weights are on the GPU.
            form: weight format on the GPU.
        """
        if plan is None and config.experts is None:
            return None
        matrices = layer_matrices(config, form, dtype)
        if plan is None:
            rows = {name: sizes.rows for name, sizes in matrices.items()}
            plan = WeightPlan(rows, config.weight_bytes(dtype, form), 0)
        return cls(matrices, plan, rates)

    @property
    def bound_tokens_per_s(self) -> float:
        """Upper bound for one chat, with any division of its weights."""
        return 1e3 / bound_ms(self.matrices, self.plan, self.rates)

    def curves(self, num_layers: int, fixed_ms: float, most_rows: int) -> tuple[Curve, Curve]:
        """Return curves of a layer's linear stages and of the CPU's part in them, by rows.

        Args:
            fixed_ms: time per layer beside its matmuls.
            most_rows: the last point.
        """
        rows = [1]
        while rows[-1] < most_rows:
            rows.append(min(max(round(rows[-1] * ROWS_STEP), rows[-1] + 1), most_rows))
        times = [weight_times(self.matrices, self.plan, self.rates, n) for n in rows]
        return (
            Curve(rows, [fixed_ms + each.ms / num_layers for each in times]),
            Curve(rows, [each.host_ms / num_layers for each in times]),
        )
