"""Where the lines of a batch file are and which begin alike, from one pass; no line is kept."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

from pipeline.batch.line import LineRefused, parse_line
from pipeline.errors import BatchFileError

BLOCK_CHARS = 1024  # of the text of a line's messages; lines share whole blocks
DIGEST_BYTES = 8
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class IndexedLine:
    """`number` counts from 1, blank lines too. `key` is a digest of the line's bytes. `blocks` holds one digest for
    each block of its messages, each over all before it; it is empty where the line is refused."""

    number: int
    offset: int
    length: int
    key: bytes
    blocks: bytes = b""
    refused: LineRefused | None = None


@dataclass
class BatchIndex:
    """The lines in order that are not blank."""

    path: Path
    lines: list[IndexedLine] = field(default_factory=list)

    def read(self, file: BinaryIO, line: IndexedLine) -> bytes:
        file.seek(line.offset)
        return file.read(line.length)


def index_file(path: Path, salt: str) -> BatchIndex:
    """`salt` is part of every key.

    Raises:
        BatchFileError: the file cannot be read or holds no line.
    """
    index = BatchIndex(path)
    seen: dict[bytes, int] = {}
    try:
        with path.open("rb") as file:
            for number, offset, data in _lines(file):
                index.lines.append(_indexed(number, offset, data, salt, seen))
    except OSError as exc:
        raise BatchFileError(path, exc.strerror or str(exc)) from exc
    if not index.lines:
        raise BatchFileError(path, "it holds no line")
    return index


def _lines(file: BinaryIO) -> Iterator[tuple[int, int, bytes]]:
    offset = 0
    for number, raw in enumerate(file, 1):
        data, start = raw, offset
        offset += len(raw)
        if number == 1 and data.startswith(_BOM):
            data, start = data[len(_BOM) :], start + len(_BOM)
        data = data.rstrip(b"\r\n")
        if data.strip():
            yield number, start, data


def _indexed(number: int, offset: int, data: bytes, salt: str, seen: dict[bytes, int]) -> IndexedLine:
    key = hashlib.blake2b(salt.encode() + b"\0" + data, digest_size=12)
    blocks = b""
    refused = None
    try:
        custom_id, body = parse_line(data, number)
        name = hashlib.blake2b(custom_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        first = seen.setdefault(name, number)
        if first != number:
            message = f"Line {number}: this custom_id is already that of line {first}; give each line its own."
            raise LineRefused("duplicate_custom_id", message, custom_id)
        blocks = block_digests(shared_text(body.get("messages")))
    except LineRefused as exc:
        key.update(b"\0" + os.fsencode(str(number)))  # refused lines may be equal
        refused = exc
    return IndexedLine(number, offset, len(data), key.digest(), blocks, refused)


def shared_text(messages: object) -> str:
    """The text in which lines are compared, of messages that may be wrong in any way."""
    if not isinstance(messages, list):
        return ""
    return "".join(f"{one.get('role')}\0{one.get('content')}\0" for one in messages if isinstance(one, dict))


def block_digests(text: str) -> bytes:
    """Of the whole blocks of a text; equal beginnings have equal digests."""
    digests, chain = [], b""
    for start in range(0, len(text) - BLOCK_CHARS + 1, BLOCK_CHARS):
        block = text[start : start + BLOCK_CHARS].encode("utf-8", "surrogatepass")
        chain = hashlib.blake2b(chain + block, digest_size=DIGEST_BYTES).digest()
        digests.append(chain)
    return b"".join(digests)


def groups(lines: Sequence[IndexedLine]) -> Iterator[list[IndexedLine]]:
    """Lines with a long common beginning together, groups in the order of their first lines.

    Sorted by their digests, lines that begin alike are neighbours. Two neighbours are parted where they share less
    than half of what one of them shares with its other neighbour: a system prompt that all lines share does not keep
    documents together.
    """
    usable = sorted((line for line in lines if line.refused is None), key=lambda line: line.blocks)
    shared = [0, *(_shared(*pair) for pair in pairwise(usable)), 0]
    found: list[list[IndexedLine]] = []
    for at, line in enumerate(usable):
        before = shared[at]
        best = max(shared[max(at - 1, 0)], before, shared[at + 1])
        if found and before and 2 * before >= best:
            found[-1].append(line)
        else:
            found.append([line])
    for group in found:
        group.sort(key=lambda line: line.number)
    yield from sorted(found, key=lambda group: group[0].number)


def _shared(left: IndexedLine, right: IndexedLine) -> int:
    """How many blocks two lines share at their beginning: digests are chained, so a later pair that is equal proves
    the earlier ones."""
    low, high = 0, min(len(left.blocks), len(right.blocks)) // DIGEST_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        at = slice((middle - 1) * DIGEST_BYTES, middle * DIGEST_BYTES)
        low, high = (middle, high) if left.blocks[at] == right.blocks[at] else (low, middle - 1)
    return low
