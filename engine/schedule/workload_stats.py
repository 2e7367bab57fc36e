"""What requests are like on average, as far as it shows: how long prompts are, and outputs."""

EXPECTED_OUTPUT_TOKENS = 200.0  # counts like the output of one request that has ended
MEMORY = 512.0  # requests; older ones count less


class WorkloadStats:
    """Counts, from which averages follow.

    Of requests that have not ended only what they have written so far is known. All tokens over all ends is
    what the average would be if each token were the last one with the same probability.
    """

    def __init__(self) -> None:
        self._prompt_tokens, self._prompts = 0.0, 0.0
        self._output_tokens, self._ends = EXPECTED_OUTPUT_TOKENS, 1.0

    def add(self, prompt_tokens: int) -> None:
        """Count a request that came."""
        if self._prompts >= MEMORY:
            self._prompt_tokens, self._prompts = self._prompt_tokens / 2, self._prompts / 2
        self._prompt_tokens += prompt_tokens
        self._prompts += 1

    def count_tokens(self, count: int) -> None:
        """Count tokens that requests got."""
        self._output_tokens += count

    def end(self) -> None:
        """Count a request that ended."""
        if self._ends >= MEMORY:
            self._output_tokens, self._ends = self._output_tokens / 2, self._ends / 2
        self._ends += 1

    @property
    def prompt_tokens(self) -> float:
        """Of a request."""
        return max(self._prompt_tokens / max(self._prompts, 1.0), 1.0)

    @property
    def output_tokens(self) -> float:
        """Of a request."""
        return max(self._output_tokens / self._ends, 1.0)

    @property
    def context_tokens(self) -> float:
        """Of a decode: halfway through the output."""
        return self.prompt_tokens + self.output_tokens / 2
