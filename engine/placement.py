"""Where a request's KV may live, and the policies that choose among those places."""

from dataclasses import dataclass
from enum import Enum, StrEnum, auto


class Place(StrEnum):
    """A memory that can hold a request's KV; attention is computed next to it."""

    DEVICE = "device"  # the GPU-cache (imitated in host memory where there is no GPU)
    HOST = "host"  # the CPU-cache: decode attention runs in the native CPU kernel


class Batching(Enum):
    """How the decodes of an iteration are divided into sub-batches."""

    ONE = auto()  # everything in one
    SYMMETRIC = auto()  # two with equal CPU attention (FastDecode)
    ASYMMETRIC = auto()  # NEO's six steps: the CPU hides behind the device, or waits
    BEST = auto()  # whatever is predicted fastest, the three above included


@dataclass(frozen=True, slots=True)
class Policy:
    """The places that a policy uses, the most preferred one first, and how it makes batches."""

    name: str
    places: tuple[Place, ...]
    batching: Batching

    @property
    def needs_predictions(self) -> bool:
        """Whether its decisions depend on a cost model."""
        return self.batching in (Batching.ASYMMETRIC, Batching.BEST)


POLICIES = {
    policy.name: policy
    for policy in (
        Policy("gpu-only", (Place.DEVICE,), Batching.ONE),
        Policy("fastdecode", (Place.HOST,), Batching.SYMMETRIC),
        Policy("neo", (Place.DEVICE, Place.HOST), Batching.ASYMMETRIC),
        Policy("auto", (Place.DEVICE, Place.HOST), Batching.BEST),
    )
}


def get_policy(name: str) -> Policy:
    """Return the policy of that name.

    Raises:
        ValueError: there is none; the message lists those there are.
    """
    if name not in POLICIES:
        raise ValueError(f"policy {name!r} is unknown; choose one of: {', '.join(POLICIES)}")
    return POLICIES[name]
