"""Tables of published speeds beside predictions, as the program and as neo-desktop would place the model.

python -m benchmarks.world_tables rows     every row that can be modelled
python -m benchmarks.world_tables cards    the best-known models, as in docs/simulation.md
"""

import argparse
from collections.abc import Iterator, Sequence

from benchmarks.world import Case, Parameters, cases, halves, stored
from benchmarks.world_rows import Row
from neo_desktop.engine.loading import gpu_form
from neo_desktop.models.config import ModelConfig
from neo_desktop.models.gguf.types import BY_NAME
from neo_desktop.models.linear.dense import DENSE
from neo_desktop.models.linear.protocol import WeightFormat
from neo_desktop.models.linear.quantised import PartShape
from neo_desktop.models.stored_form import StoredForm
from research.cases import header
from research.cases import row as print_row
from research.weights_simulation import chat_rate

# Types of a file: most matrices, and half of the down projections with the head. IQ2 and IQ3 have no
# kernels here: a file of the next larger type takes their place.
TYPES = {
    "Q8_0": ("Q8_0", "Q8_0"),
    "Q6_K": ("Q6_K", "Q6_K"),
    **dict.fromkeys(("Q4_K_XL", "Q4_K_M", "MXFP4, Q4_K_M"), ("Q4_K", "Q6_K")),
    "Q4_K_S": ("Q4_K", "Q4_K"),
    "Q4_0": ("Q4_0", "Q4_0"),
    "IQ4_XS": ("IQ4_XS", "IQ4_XS"),
    "MXFP4": ("Q8_0", "Q8_0"),
    **dict.fromkeys(("Q2_K", "Q2_K_XL", "IQ2_XXS"), ("Q2_K", "Q2_K")),
    **dict.fromkeys(("IQ3_S", "IQ3_XXS"), ("Q3_K", "Q3_K")),
}
CARDS = (
    ("Qwen3.8-27B on 12 GB", "rtx-4070", "qwen3.8-27b", "Q4_K_M"),
    ("Qwen3.6-35B-A3B on 8 GB", "rtx-4060-ti", "qwen3.6-35b-a3b", "Q4_K_S"),
    ("Qwen3.6-35B-A3B on 12 GB", "rtx-4070", "qwen3.6-35b-a3b", "Q4_K_XL"),
    ("Qwen3.6-35B-A3B on 16 GB", "rtx-5080", "qwen3.6-35b-a3b", None),
    ("Qwen3.6-35B-A3B on 24 GB", "rtx-4090", "qwen3.6-35b-a3b", None),
    ("gpt-oss-20b", "rtx-3060", "gpt-oss-20b", None),
    ("gpt-oss-20b", "rtx-4090", "gpt-oss-20b", None),
    ("Llama-3.1-8B", "rtx-3080", "llama-3.1-8b", None),
    ("Qwen3.8-27B", "rtx-4090", "qwen3.8-27b", None),
    ("LFM2.5-8B-A1B", "rtx-3060", "lfm2.5-8b-a1b", None),
    ("Gemma-4-26B-A4B", "rtx-4090", "gemma-4-26b-a4b", None),
    ("Nemotron-3-Nano", "rtx-5090", "nemotron-3-nano", None),
    ("GLM-4.7-Flash", "rtx-5090", "glm-4.7-flash", None),
)


def file_form(config: ModelConfig, quant: str) -> WeightFormat:
    """Return the format of a GGUF file on a GPU."""
    if quant == "F16":
        return gpu_form(DENSE)
    most, more = TYPES[quant]
    widths = {name: (matrix.rows, matrix.columns) for name, matrix in config.each_matrix()}
    widths["embedding"] = (config.vocab_size, config.hidden_size)
    stored = {}
    for name, (rows, width) in widths.items():
        layer, _, kind = name.partition(".")
        is_more = name == "head" or ("down" in kind and int(layer) % 2 == 1)
        type_name = more if is_more or (name == "embedding" and config.tie_word_embeddings) else most
        if "experts_" in kind and quant.startswith("MXFP4"):
            type_name = "MXFP4"
        stored[name] = (PartShape("Q8_0" if width % BY_NAME[type_name].elements else type_name, rows),)
    return gpu_form(StoredForm(stored=stored))


def ours(row: Row) -> tuple[str, str]:
    """Return this project's predicted speed, and with KV of the whole context on the card."""
    if row.gpu is None:
        return "", ""
    config, host = row.config, row.host
    form = file_form(config, row["quant"])
    found = []
    for tokens in (None, row["context"]):
        rate = chat_rate(row.gpu.name, config, form, row["context"], tokens, host)
        found.append("does not fit" if rate is None else f"{rate[0]:.3g}")
    return found[0], found[1]


def _shown(case: Case, found: Parameters) -> tuple[str, ...]:
    row = case.row
    program = f"{row['program']}, {row['how']}"
    return program, f"{row['context']:,}", f"{row['tps']:g}", f"{1 / case.seconds(found):.3g}", *ours(row)


COLUMNS = ("program", "context", "published", "predicted", "ours", "with --gpu-cache-tokens")


def rows(all_cases: Sequence[Case], found: Parameters) -> None:
    """Print every row that can be modelled."""
    fitted, checked = halves(all_cases)
    header("card", "model", "half", *COLUMNS)
    for case in all_cases:
        half = "fit" if case in fitted else "check" if case in checked else "not counted"
        print_row(
            str(case.row["card"]), f"{case.row['model']} {case.row['quant']}", half, *_shown(case, found)
        )


def _best_known(all_cases: Sequence[Case]) -> Iterator[tuple[str, Case]]:
    for title, card, model, quant in CARDS:
        for case in all_cases:
            row = case.row
            if (row["card"], row["model"]) == (card, model) and quant in (None, row["quant"]):
                yield title, case


def best_known(all_cases: Sequence[Case], found: Parameters) -> None:
    """Print the rows that people ask for."""
    header("model", "card", "file", *COLUMNS)
    for title, case in _best_known(all_cases):
        assert case.row.gpu is not None
        print_row(title, case.row.gpu.title, case.row["quant"], *_shown(case, found))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = {"rows": rows, "cards": best_known}
    parser.add_argument("part", choices=parts)
    parts[parser.parse_args().part](cases(), stored())


if __name__ == "__main__":
    main()
