"""The choice among a repository's GGUF files: by name, by quantisation, or by default."""

import re
from collections.abc import Iterable, Sequence

from neo_desktop.models.gguf.checkpoint import is_first_part, parts_of

DEFAULT = "Q4_K_M"
# By size; the ends of the names are makers' mixtures, of which the engine reads every type.
SIZES = (
    *("Q2_K", "Q2_K_L", "Q2_K_XL", "Q3_K_S", "Q3_K_M", "Q3_K_L", "Q3_K_XL", "IQ4_XS", "IQ4_NL", "Q4_0"),
    *("Q4_K_S", DEFAULT, "Q4", "Q4_K_L", "Q4_K_XL", "Q4_1", "MXFP4", "Q5_0", "Q5_K_S", "Q5_K_M", "Q5_K_L"),
    *("Q5_K_XL", "Q5_1", "Q6_K", "Q6_K_L", "Q6_K_XL", "Q8_0", "Q8", "Q8_K_XL", "BF16", "F16", "FP16", "F32"),
)
_NAME = re.compile(r"(?:.*[-._/])?(?P<name>" + "|".join(SIZES) + r")", re.IGNORECASE)
_PART = re.compile(r"-\d{5}-of-\d{5}$")
_NO_MODEL = re.compile(r"mmproj|imatrix|(?:^|/)mtp-", re.IGNORECASE)  # what sees, calibrates or drafts


def quantisation(file: str) -> str | None:
    """Return that of a file as its name tells, in capitals; None: it does not, or none that is known."""
    found = _NAME.fullmatch(_PART.sub("", file.removesuffix(".gguf")))
    return found["name"].upper() if found else None


def gguf_models(files: Iterable[str]) -> list[str]:
    """Return the models among the files of a repository; of split ones the first part."""
    return sorted(
        file
        for file in files
        if file.endswith(".gguf") and not _NO_MODEL.search(file) and is_first_part(file)
    )


def choose(models: Sequence[str], wanted: str | None) -> str:
    """Return the model that is meant.

    Args:
        models: see `gguf_models`; at least one.
        wanted: a file's name or a quantisation; None: the usual one, or the nearest to it.

    Raises:
        ValueError: no file matches; the message lists the files.
    """
    if wanted is None:
        known = [file for file in models if quantisation(file) is not None]
        return min(known or models, key=_distance)
    lower = wanted.lower()
    for file in models:
        if lower in (file.lower(), file.lower().rpartition("/")[2], str(quantisation(file)).lower()):
            return file
    there = ", ".join(quantisation(file) or file for file in models[:40])
    raise ValueError(f"it has no {wanted}; there are {there}")


def files_of(model: str) -> list[str]:
    """Return the files of a model: its parts, or itself."""
    folder, slash, name = model.rpartition("/")
    return [f"{folder}{slash}{part}" for part in parts_of(name)]


def _distance(file: str) -> tuple[int, str]:
    name = quantisation(file)
    return (abs(SIZES.index(name) - SIZES.index(DEFAULT)) if name in SIZES else len(SIZES), file)
