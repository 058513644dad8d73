"""Tokens counted on a host without torch: the model's tokenizer.json, read by the `tokenizers` library alone."""

from pathlib import Path
from typing import Protocol

from kernels.settings import KernelSettings

CHARS_PER_TOKEN = 4.0  # of English in the tokenizers of today's models, as a rule


class CountsTokens(Protocol):
    @property
    def is_estimate(self) -> bool: ...

    def count(self, text: str) -> int: ...


class TokenizerFile:
    """Counts as the model will, but for the few tokens of the template around document and question."""

    is_estimate = False

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(path))
        self._tokenizer.encode_special_tokens = True  # what stands in a document is text

    def count(self, text: str) -> int:
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)


class CharacterCount:
    """Where the model does not lie on this host."""

    is_estimate = True

    def count(self, text: str) -> int:
        return round(len(text) / CHARS_PER_TOKEN)


def token_counter(settings: KernelSettings) -> CountsTokens:
    path = Path(settings.model).expanduser() / "tokenizer.json"
    return TokenizerFile(path) if path.is_file() else CharacterCount()
