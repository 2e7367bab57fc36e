"""Times of iterations with drafts, relative to those without: guesses, corrected by measured iterations."""

from dataclasses import dataclass

from neo_desktop.engine.batch import rounded_size

REMEMBERED = 0.97  # of older iterations, per iteration
FORGOTTEN = 0.998  # of the measured excess, per iteration without drafts: what was slow is tried again
TRUST = 0.2  # in the guess, against squares of measured excesses
READING_ROWS = 8  # a guess: reading the weights takes as long as computing this number of rows
LONGEST = 3.0  # most time that counts, relative to the expected: other programs delay single iterations


@dataclass(slots=True)
class _Measured:
    """Iterations with a similar number of decodes."""

    ms: float = 0.0  # sum without drafts
    predicted_ms: float = 0.0
    # The excess is the relative time minus 1; guessed and measured ones are proportional.
    products: float = TRUST  # sum of measured times guessed excesses
    squares: float = TRUST  # sum of squares of guessed excesses

    @property
    def pace(self) -> float:
        return self.ms / self.predicted_ms if self.predicted_ms else 0.0

    @property
    def factor(self) -> float:
        return max(self.products / self.squares, 0.0)


class RelativeTimes:
    """Relative times by the number of decodes.

    Tables alone are no basis: they are often measured while other programs run.
    """

    def __init__(self) -> None:
        self._measured: dict[int, _Measured] = {}

    def _of(self, num_decodes: int) -> _Measured:
        return self._measured.setdefault(rounded_size(num_decodes), _Measured())

    def corrected(self, num_decodes: int, guess: float) -> float:
        """Return the relative time for a guess."""
        return 1.0 + (guess - 1.0) * self._of(num_decodes).factor

    def pace(self, num_decodes: int) -> float:
        """Return the measured time of an iteration without drafts, over its predicted time; 0: unknown."""
        return self._of(num_decodes).pace

    def learn(self, num_decodes: int, predicted_ms: float, ms: float, guess: float) -> None:
        """Note an iteration.

        Args:
            predicted_ms: of the same iteration without drafts.
            ms: measured.
            guess: of the relative time; 1: it has no drafts.
        """
        measured = self._of(num_decodes)
        if guess == 1.0:
            most = LONGEST * measured.pace * predicted_ms
            measured.ms = REMEMBERED * measured.ms + (min(ms, most) if most else ms)
            measured.predicted_ms = REMEMBERED * measured.predicted_ms + predicted_ms
            measured.products += (1 - FORGOTTEN) * (measured.squares - measured.products)
        elif measured.pace:
            excess, expected = guess - 1.0, self.corrected(num_decodes, guess)
            ratio = min(ms / (predicted_ms * measured.pace), LONGEST * expected)
            measured.products = REMEMBERED * measured.products + (ratio - 1.0) * excess
            measured.squares = REMEMBERED * measured.squares + excess**2
