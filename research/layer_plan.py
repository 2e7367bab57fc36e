"""Placement of whole layers, as llama.cpp divides a model: a baseline."""

from collections import defaultdict

import torch

from neo_desktop.engine.predict.weight_plan import WeightPlan, layer_matrices, least_gpu_bytes, with_parts
from neo_desktop.models.config import ModelConfig
from neo_desktop.models.linear.protocol import WeightFormat


def plan_layers(config: ModelConfig, form: WeightFormat, dtype: torch.dtype, gpu_bytes: int) -> WeightPlan:
    """Put as many of the first layers as fit on the GPU, the others in host memory, like llama.cpp.

    In an MoE model, all weights but the experts come first. No matrix is divided.

    Args:
        gpu_bytes: limit for weights on the GPU; at least `least_gpu_bytes`.
    """
    matrices = layer_matrices(config, form, dtype)
    taken = least_gpu_bytes(config, form, dtype)
    layers: dict[tuple[bool, int], list[str]] = defaultdict(list)
    for name, sizes in matrices.items():
        layers[sizes.used_share < 1, int(name.split(".")[0])].append(name)
    resident = dict.fromkeys(matrices, 0)
    on_host = sum(sizes.host_bytes for sizes in matrices.values())
    for _, names in sorted(layers.items()):
        nbytes = sum(matrices[name].device_bytes for name in names)
        if taken + nbytes > gpu_bytes:
            break
        taken += nbytes
        on_host -= sum(matrices[name].host_bytes for name in names)
        resident |= {name: matrices[name].rows for name in names}
    return WeightPlan(with_parts(resident, config), taken, on_host)
