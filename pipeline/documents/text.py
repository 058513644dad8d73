import codecs
import re
from pathlib import Path

from charset_normalizer import from_bytes

from pipeline.documents.document import RawPages
from pipeline.errors import UnreadableDocument

# The marks of UTF-32 begin with those of UTF-16, so they come first.
_BYTE_ORDER_MARKS = {
    codecs.BOM_UTF8: "utf-8",
    codecs.BOM_UTF32_LE: "utf-32-le",
    codecs.BOM_UTF32_BE: "utf-32-be",
    codecs.BOM_UTF16_LE: "utf-16-le",
    codecs.BOM_UTF16_BE: "utf-16-be",
}
# Which bytes of four are zero, for text that is mostly ASCII.
_ZERO_PATTERNS: dict[tuple[bool, ...], str] = {
    (False, True, True, True): "utf-32-le",
    (True, True, True, False): "utf-32-be",
    (False, True, False, True): "utf-16-le",
    (True, False, True, False): "utf-16-be",
}
_SAMPLE_BYTES = 64 * 1024
_MOST_FOREIGN_BYTES = 0.05
_MOST_CONTROL_CHARACTERS = 0.1

# Filings with the SEC mark pages with a line `<PAGE>`, often with the number of the page that begins.
_PAGE_BREAK = re.compile(r"(?:\f[ \t\n]*|^[ \t]*)<PAGE>(?:[ \t]+\d+)?[ \t]*$|\f", re.MULTILINE | re.IGNORECASE)

_FOREIGN = re.compile("[\udc80-\udcff]")
_WINDOWS_1252 = {0xDC00 + byte: bytes([byte]).decode("cp1252", errors="replace") for byte in range(0x80, 0x100)}
_CONTROL = re.compile("[\x00-\x08\x0e-\x1a\x1c-\x1f]")


def read_text(path: Path) -> RawPages:
    text = decode(path.read_bytes()).replace("\r\n", "\n").replace("\r", "\n")
    sample = text[:_SAMPLE_BYTES]
    if len(_CONTROL.findall(sample)) > _MOST_CONTROL_CHARACTERS * len(sample):
        raise UnreadableDocument(path, reason="it holds binary data, not text")
    pages = _PAGE_BREAK.split(text)
    # The mark stands before the first page, or a form feed after the last.
    if len(pages) > 1 and not pages[0].strip():
        del pages[0]
    if len(pages) > 1 and not pages[-1].strip():
        del pages[-1]
    return RawPages(pages)


def decode(data: bytes) -> str:
    """By byte order mark, by pattern of zero bytes, as UTF-8, as Windows-1252, else by a guess."""
    for mark, encoding in _BYTE_ORDER_MARKS.items():
        if data.startswith(mark):
            return data[len(mark) :].decode(encoding, errors="replace")
    if encoding := _ZERO_PATTERNS.get(_zero_pattern(data[:_SAMPLE_BYTES]), ""):
        return data.decode(encoding, errors="replace")
    text = data.decode("utf-8", errors="surrogateescape")
    num_foreign = len(_FOREIGN.findall(text))
    # Western text is nearly all ASCII, also where UTF-8 and Windows-1252 were pasted into one file.
    guess = from_bytes(data).best() if num_foreign > _MOST_FOREIGN_BYTES * len(data) else None
    return text.translate(_WINDOWS_1252) if guess is None else str(guess)


def _zero_pattern(sample: bytes) -> tuple[bool, ...]:
    """For each of four neighbouring bytes: is it mostly zero? Text in one-byte encodings has hardly any."""
    return tuple(len(column) > 0 and column.count(0) > 0.7 * len(column) for column in (sample[i::4] for i in range(4)))
