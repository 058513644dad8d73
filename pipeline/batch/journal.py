"""What is done of a batch file, kept line by line beside the output, so that a run that was killed goes on."""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from pipeline.errors import BatchFileError


class Journal:
    """Records by the keys of their lines. Only offsets are held in memory; what was cut off while it was written does
    not count."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path = path
        self._file = file
        self._offsets: dict[bytes, int] = {}
        end = 0
        file.seek(0)
        for raw in file:
            try:
                key = bytes.fromhex(json.loads(raw)["key"]) if raw.endswith(b"\n") else b""
            except (ValueError, KeyError, TypeError):
                key = b""
            if not key:
                break
            self._offsets[key] = end
            end += len(raw)
        file.truncate(end)
        self._end = end

    def __contains__(self, key: bytes) -> bool:
        return key in self._offsets

    def add(self, key: bytes, record: dict[str, Any]) -> None:
        """Written when this returns, even if the process is then killed."""
        data = json.dumps({"key": key.hex(), "record": record}, ensure_ascii=True).encode() + b"\n"
        self._file.seek(self._end)
        self._file.write(data)
        self._file.flush()
        self._offsets[key] = self._end
        self._end += len(data)

    def get(self, key: bytes) -> dict[str, Any]:
        self._file.seek(self._offsets[key])
        record: dict[str, Any] = json.loads(self._file.readline())["record"]
        return record


@contextmanager
def open_journal(out: Path) -> Iterator[Journal]:
    """The journal of this output; one process at a time.

    Raises:
        BatchFileError: another process writes this output.
    """
    path = out.with_name(out.name + ".journal")
    out.parent.mkdir(parents=True, exist_ok=True)
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            raise BatchFileError(out, "another process is writing it") from exc
        yield Journal(path, file)
