"""The guide's knowledge, by theme."""

from . import engine_terms, model_terms, product, sampling_terms, small_talk, usage
from .topic import DEFINITION_PATTERNS, Topic

ALL_TOPICS: tuple[Topic, ...] = (
    *small_talk.TOPICS,
    *product.TOPICS,
    *usage.TOPICS,
    *engine_terms.TOPICS,
    *sampling_terms.TOPICS,
    *model_terms.TOPICS,
)

__all__ = ["ALL_TOPICS", "DEFINITION_PATTERNS", "Topic"]
