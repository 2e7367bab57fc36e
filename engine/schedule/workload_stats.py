"""Average prompt and output length of the workload."""

EXPECTED_OUTPUT_TOKENS = 200.0  # prior: one finished request with an output of this length
MEMORY = 512.0  # requests; the weight of older ones is halved


class WorkloadStats:
    """Running counts of prompts, tokens and finished requests.

    The final length of a running request is unknown. The mean output length is therefore all output tokens
    divided by all finished requests: the estimate if each token is equally likely to be the last.
    """

    def __init__(self) -> None:
        self._prompt_tokens, self._prompts = 0.0, 0.0
        self._output_tokens, self._ends = EXPECTED_OUTPUT_TOKENS, 1.0

    def add(self, prompt_tokens: int) -> None:
        if self._prompts >= MEMORY:
            self._prompt_tokens, self._prompts = self._prompt_tokens / 2, self._prompts / 2
        self._prompt_tokens += prompt_tokens
        self._prompts += 1

    def count_tokens(self, count: int) -> None:
        self._output_tokens += count

    def end(self) -> None:
        if self._ends >= MEMORY:
            self._output_tokens, self._ends = self._output_tokens / 2, self._ends / 2
        self._ends += 1

    @property
    def prompt_tokens(self) -> float:
        """Mean prompt length."""
        return max(self._prompt_tokens / max(self._prompts, 1.0), 1.0)

    @property
    def output_tokens(self) -> float:
        """Mean output length."""
        return max(self._output_tokens / self._ends, 1.0)

    @property
    def context_tokens(self) -> float:
        """Mean context of a decode, halfway through the output."""
        return self.prompt_tokens + self.output_tokens / 2
