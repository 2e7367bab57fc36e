"""Where a request's KV may live, and the policies that choose among those places."""

from dataclasses import dataclass
from enum import StrEnum


class Place(StrEnum):
    """A memory that can hold a request's KV; attention is computed next to it."""

    DEVICE = "device"  # the GPU-cache (imitated in host memory where there is no GPU)
    HOST = "host"  # the CPU-cache: decode attention runs in the native CPU kernel


@dataclass(frozen=True, slots=True)
class Policy:
    """The places that a policy uses, the most preferred one first."""

    name: str
    places: tuple[Place, ...]


POLICIES = {
    policy.name: policy
    for policy in (
        Policy("gpu-only", (Place.DEVICE,)),
        Policy("auto", (Place.DEVICE, Place.HOST)),
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
