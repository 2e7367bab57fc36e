"""Cost models for tests: simple formulas in tables, and a hypothesis strategy for random models."""

from collections.abc import Sequence

from hypothesis import strategies as st

from neo_desktop.engine.kv_tier import MEASURED_TIERS, KVTier
from neo_desktop.engine.predict.cost_model import (
    UNSHARED,
    ZERO,
    Curve,
    MemoryShares,
    Surface,
    TableCostModel,
)

# A second tier with attention on the host, like slower memory behind a CPU.
THIRD = KVTier("third", label="third", in_host_memory=True, host_attends=True)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
CONTEXTS = (1, 16, 256, 4096)


def machine(
    *,
    weights_ms: float = 0.4,
    token_ms: float = 0.008,
    gpu_token_ms: float = 0.00003,
    cpu_token_ms: float = 0.00015,
    offload_ms: float = 0.02,
    transfer_token_ms: float = 0.001,
    swap_token_ms: float = 0.0007,
    duplex: float = 1.0,
    memory_shares: MemoryShares = UNSHARED,
    overlaps: bool = True,
    num_layers: int = 32,
    tiers: Sequence[KVTier] = MEASURED_TIERS,
) -> TableCostModel:
    """Return the costs of a machine; defaults resemble Llama-2-7B on a T4-class slice (times per layer)."""

    def surface(token_ms: float) -> Surface:
        return Surface(
            SIZES, CONTEXTS, [[0.002 * bool(token_ms) + x * y * token_ms for y in CONTEXTS] for x in SIZES]
        )

    return TableCostModel(
        num_layers=num_layers,
        overlaps=overlaps,
        iteration_ms=0.2,
        linear=Curve(SIZES, [max(weights_ms, n * token_ms) for n in SIZES]),
        head=Curve(SIZES, [0.3 + 0.001 * n for n in SIZES]),
        offload=Curve(SIZES, [offload_ms] * len(SIZES)),
        transfer=Curve(SIZES, [n * transfer_token_ms for n in SIZES]),
        swap=Curve(SIZES, [n * swap_token_ms for n in SIZES]),
        duplex=duplex,
        memory_shares=memory_shares,
        first_chunk_attention=Curve(
            SIZES, [0.002 * bool(gpu_token_ms) + n * n / 2 * gpu_token_ms / 10 for n in SIZES]
        ),
        later_chunk_attention=surface(gpu_token_ms / 10),
        attention={tier: surface(cpu_token_ms if tier.host_attends else gpu_token_ms) for tier in tiers},
    )


def cost_models(tiers: Sequence[KVTier] = MEASURED_TIERS) -> st.SearchStrategy[TableCostModel]:
    """Draw cost models of sensible and odd machines."""
    times = st.sampled_from((0.0, 1e-5, 1e-3, 0.1, 10.0))
    return st.one_of(
        st.just(ZERO),
        st.builds(
            machine,
            weights_ms=times,
            token_ms=times,
            gpu_token_ms=times,
            cpu_token_ms=times,
            offload_ms=times,
            transfer_token_ms=times,
            swap_token_ms=times,
            overlaps=st.booleans(),
            num_layers=st.integers(1, 40),
            tiers=st.just(tuple(tiers)),
        ),
    )


def flat_cost(linear_ms: float = 1.0, iteration_ms: float = 0.0) -> TableCostModel:
    """Return the costs of one layer with constant linear time; all other stages are free."""
    free = Surface((1, 2), (1, 2), ((0, 0), (0, 0)))
    nothing = Curve((1, 2), (0, 0))
    return TableCostModel(
        1,
        True,
        iteration_ms,
        Curve((1, 2), (linear_ms, linear_ms)),
        nothing,
        nothing,
        nothing,
        nothing,
        free,
        dict.fromkeys(MEASURED_TIERS, free),
    )
