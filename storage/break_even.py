"""When reading a document once and storing what the model made of it beats reading it for each question."""

from dataclasses import dataclass

SHORT_TOKENS = 4_000  # a document below it is read in little more time than a message and a load take


@dataclass(frozen=True)
class SplitRates:
    """What the rule stands on, as measured."""

    prefill_tokens_per_s: float
    put_bytes_per_s: float
    get_bytes_per_s: float
    kv_bytes_per_token: float

    def read_s(self, tokens: float) -> float:
        return tokens / self.prefill_tokens_per_s

    def put_s(self, tokens: float) -> float:
        """Beyond what is hidden behind reading: chunks are stored while the next is computed."""
        return max(0.0, tokens * self.kv_bytes_per_token / self.put_bytes_per_s - self.read_s(tokens))

    def get_s(self, tokens: float) -> float:
        return tokens * self.kv_bytes_per_token / self.get_bytes_per_s

    def break_even(self, tokens: float) -> int | None:
        """The number of questions n from which n·read > read + put + get; None: reading costs nothing."""
        read = self.read_s(tokens)
        return int((read + self.put_s(tokens) + self.get_s(tokens)) / read) + 1 if read else None
