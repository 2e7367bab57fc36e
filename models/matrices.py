"""The matrices of a decoder, and the weights of checkpoints in each."""

from dataclasses import dataclass

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"  # of the project's own decoder


@dataclass(frozen=True, slots=True)
class Matrix:
    """Weights with the same input, stacked by rows.

    Args:
        name: "3.qkv", "head" or "embedding", see `WeightFormat.named`.
        weights: their names in checkpoints; empty in shapes for measurements.
        part_rows: per weight.
        biases: their names; empty: no biases.
        experts: number of experts stacked in it; 0: not a matrix of experts.
        per_token: number of experts that one token uses.
        is_table: rows are only looked up, never multiplied.
    """

    name: str
    weights: tuple[str, ...]
    part_rows: tuple[int, ...]
    columns: int
    biases: tuple[str, ...] = ()
    experts: int = 0
    per_token: int = 0
    is_table: bool = False

    @property
    def rows(self) -> int:
        return sum(self.part_rows)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the weights and biases."""
        found: dict[str, tuple[int, ...]] = {}
        for names, columns in ((self.weights, (self.columns,)), (self.biases, ())):
            found |= {name: (rows, *columns) for name, rows in zip(names, self.part_rows, strict=False)}
        return found

    @property
    def num_weights(self) -> int:
        """Numbers of the matrix and its bias."""
        return self.rows * (self.columns + bool(self.biases))
