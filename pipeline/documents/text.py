import re
from pathlib import PurePath

from pipeline.documents.charset import decode
from pipeline.documents.document import RawPages
from pipeline.errors import UnreadableDocument

_SAMPLE_CHARACTERS = 64 * 1024
_MOST_CONTROL_CHARACTERS = 0.1

# Filings with the SEC mark pages with a line `<PAGE>`, often with the number of the page that begins.
_PAGE_BREAK = re.compile(r"(?:\f[ \t\n]*|^[ \t]*)<PAGE>(?:[ \t]+\d+)?[ \t]*$|\f", re.MULTILINE | re.IGNORECASE)
_CONTROL = re.compile("[\x00-\x08\x0e-\x1a\x1c-\x1f]")


def read_text(path: PurePath, data: bytes) -> RawPages:
    text = decode(data).replace("\r\n", "\n").replace("\r", "\n")
    sample = text[:_SAMPLE_CHARACTERS]
    if len(_CONTROL.findall(sample)) > _MOST_CONTROL_CHARACTERS * len(sample):
        raise UnreadableDocument(path, reason="it holds binary data, not text")
    pages = _PAGE_BREAK.split(text)
    # The mark stands before the first page, or a form feed after the last.
    if len(pages) > 1 and not pages[0].strip():
        del pages[0]
    if len(pages) > 1 and not pages[-1].strip():
        del pages[-1]
    return RawPages(pages)
