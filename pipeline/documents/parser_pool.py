"""Parsing processes that are kept for the next file."""

import atexit
import json
import math
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path, PurePath
from typing import Any

from pipeline.documents.options import AS_USUAL, ParseLimits, ReadOptions
from pipeline.errors import DOCUMENT_ERRORS, DocumentError, OcrNotInstalled, ParseLimitExceeded, UnreadableDocument

# -P: a module of the same name in the folder where the user stands is not ours.
SERVER_COMMAND = (sys.executable, "-P", "-m", "pipeline.documents.parser_server")

_PACKAGE_ROOT = Path(__file__).resolve().parents[2]
_KEPT_VARIABLES = ("HOME", "LD_LIBRARY_PATH", "PATH", "TMPDIR")
_PATIENCE_S = 30  # beyond the time limit, which the server itself enforces
_MOST_IDLE = 64
_OCR_TIMES = 20  # a scanned page takes seconds, not milliseconds


class _Server:
    def __init__(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [*SERVER_COMMAND, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=_environment(),
                pass_fds=[theirs.fileno()],
            )

    def ask(self, request: dict[str, Any], file: int) -> tuple[bytes, dict[str, Any]]:
        """The answer, and how the file's process ended. Raises: OSError, ValueError when the server is gone."""
        self._control.settimeout(request["time_s"] + _PATIENCE_S)
        reading, writing = os.pipe()
        with os.fdopen(reading, "rb") as stream:
            try:
                socket.send_fds(self._control, [json.dumps(request).encode()], [writing, file])
            finally:
                os.close(writing)
            return stream.read(), json.loads(self._control.recv(1 << 16))

    def close(self) -> None:
        self._control.close()
        self._process.kill()
        self._process.wait()


_idle: deque[_Server] = deque()


def close_idle() -> None:
    while _idle:
        _idle.pop().close()


atexit.register(close_idle)
# A forked process must not talk over its parent's sockets.
os.register_at_fork(after_in_child=_idle.clear)


def ask_parser(
    path: PurePath,
    file: int,
    *,
    limits: ParseLimits,
    options: ReadOptions = AS_USUAL,
    way: tuple[int, ...] = (),
    listing: bool = False,
) -> dict[str, Any]:
    """What the parser says about an open file, or about a file in the archive that it is.

    Raises:
        DocumentError: and nothing else, whatever the file holds.
        OcrNotInstalled: scans are to be recognised.
    """
    if options.ocr:
        if find_spec("rapidocr_onnxruntime") is None:
            raise OcrNotInstalled
        limits = replace(limits, time_s=_OCR_TIMES * limits.time_s)
    request = {
        "path": str(path),
        "way": way,
        "list": listing,
        "options": asdict(options),
        "time_s": limits.time_s,
        "memory_bytes": limits.memory_bytes,
        "max_file_bytes": limits.max_file_bytes,
    }
    try:
        server = _idle.pop()
    except IndexError:
        server = _Server()
    try:
        written, ended = server.ask(request, file)
    except BaseException as exc:
        server.close()
        if isinstance(exc, OSError | ValueError):
            raise UnreadableDocument(path, reason="the parser gave no answer") from exc
        raise
    if len(_idle) < _MOST_IDLE:
        _idle.append(server)
    else:
        server.close()
    return _answer(path, written, ended, limits)


def _answer(path: PurePath, written: bytes, ended: dict[str, Any], limits: ParseLimits) -> dict[str, Any]:
    if ended["over_time"]:
        raise _over_time(path, limits)
    if ended["returncode"] != 0:
        raise _death(path, ended["returncode"], limits)
    try:
        answer: dict[str, Any] = json.loads(written.decode(errors="surrogatepass"))
    except ValueError as exc:
        raise UnreadableDocument(path, reason="the parser gave no answer") from exc
    if "error" in answer:
        raise error_of(path, answer["error"])
    return answer


def error_of(path: PurePath, record: dict[str, Any]) -> DocumentError:
    return DOCUMENT_ERRORS[record["code"]](path, **record["details"])


def _environment() -> dict[str, str]:
    """Nothing of ours but the way to the packages: a process that reads strangers' files needs no passwords."""
    kept = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
    python_path = os.pathsep.join(filter(None, [str(_PACKAGE_ROOT), os.environ.get("PYTHONPATH")]))
    return {**kept, "PYTHONPATH": python_path, "PYTHONUTF8": "1"}


def _death(path: PurePath, returncode: int, limits: ParseLimits) -> DocumentError:
    if returncode == -signal.SIGXCPU:
        return _over_time(path, limits)
    if returncode == -signal.SIGKILL:  # the kernel's answer where memory runs out
        return ParseLimitExceeded(path, resource="memory", limit=limits.memory_bytes / 2**20, unit="MiB")
    if returncode < 0:
        return UnreadableDocument(path, reason=f"the parser crashed with {signal.Signals(-returncode).name}")
    return UnreadableDocument(path, reason=f"the parser stopped with status {returncode}")


def _over_time(path: PurePath, limits: ParseLimits) -> ParseLimitExceeded:
    return ParseLimitExceeded(path, resource="time", limit=math.ceil(limits.time_s), unit="s")
