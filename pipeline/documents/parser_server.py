"""The process in which files are parsed: `python -m pipeline.documents.parser_server FD`.

It loads the parsers once and then forks for each file, so a file that hangs, crashes or eats memory ends a process
that lived for it alone and that could tell no other file's text. It has one thread, so forking is safe.

FD is a socket of packets. A request is one JSON object with two descriptors beside it, the pipe for the answer and the
open file; the file's process writes its answer, one JSON object, into the pipe. Then the server sends one more packet,
how that process ended. A closed socket ends the server and the process that it waits for.
"""

import gc
import json
import math
import os
import resource
import select
import signal
import socket
import sys
import traceback
from dataclasses import asdict
from pathlib import Path, PurePath
from typing import Any

from pipeline.documents.archive import is_office_file, list_members, read_member
from pipeline.documents.options import ReadOptions
from pipeline.documents.parse import parse
from pipeline.errors import DocumentError, ParseLimitExceeded, UnreadableDocument

_LONGEST_REQUEST = 1 << 20


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    gc.freeze()  # what is loaded stays shared with the forked processes
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, _LONGEST_REQUEST, 2)
        if not message:
            return
        request = json.loads(message)
        answer, file = descriptors
        pid = os.fork()
        if not pid:
            control.close()
            _work(request, answer, file)
        os.close(answer)
        os.close(file)
        ended = _wait(pid, request["time_s"], control)
        control.send(json.dumps(ended).encode())


def _wait(pid: int, time_s: float, control: socket.socket) -> dict[str, Any]:
    """How the process ended. It is killed at its time limit, and when nobody waits for its answer any more."""
    process = os.pidfd_open(pid)
    try:
        poll = select.poll()
        poll.register(process, select.POLLIN)
        poll.register(control, select.POLLHUP)
        ready = [descriptor for descriptor, _ in poll.poll(time_s * 1000)]
        if process not in ready:
            os.kill(pid, signal.SIGKILL)
    finally:
        os.close(process)
    _, status = os.waitpid(pid, 0)
    return {"returncode": os.waitstatus_to_exitcode(status), "over_time": not ready}


def _work(request: dict[str, Any], answer: int, file: int) -> None:
    """Never returns."""
    returncode = 1
    try:
        set_limits(memory_bytes=request["memory_bytes"], time_s=request["time_s"])
        found = json.dumps(answer_to(request, file), ensure_ascii=False).encode(errors="surrogatepass")
        with os.fdopen(answer, "wb") as stream:
            stream.write(found)
        returncode = 0
    finally:
        os._exit(returncode)


def set_limits(*, memory_bytes: int, time_s: float) -> None:
    """Memory on top of what the process has; the server enforces the time too, this limit holds when it is gone."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    cpu_s = math.ceil(time_s)
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def answer_to(request: dict[str, Any], file: int) -> dict[str, Any]:
    path = PurePath(request["path"])
    memory_bytes, max_file_bytes = request["memory_bytes"], request["max_file_bytes"]
    try:
        data = os.pread(file, os.fstat(file).st_size, 0)  # not `read`: others may hold the same open file
        if request["list"]:
            if is_office_file(data):
                return {"members": None}
            members = list_members(path, data, max_file_bytes=max_file_bytes)
            return {"members": [(member.way, member.name, _error_record(member.error)) for member in members]}
        data = read_member(path, data, tuple(request["way"]), max_file_bytes=max_file_bytes)
        return asdict(parse(path, data, ReadOptions.of(request["options"]), max_file_bytes=max_file_bytes))
    except DocumentError as exc:
        error = exc
    except MemoryError:
        error = ParseLimitExceeded(path, resource="memory", limit=memory_bytes / 2**20, unit="MiB")
    except Exception as exc:
        # The type and the place, for a bug report; its message may quote the document.
        place = traceback.extract_tb(exc.__traceback__)[-1]
        error = UnreadableDocument(path, reason=f"{type(exc).__name__} in {Path(place.filename).name}:{place.lineno}")
    return {"error": _error_record(error)}


def _error_record(error: DocumentError | None) -> dict[str, Any] | None:
    return {"code": error.code, "details": error.details} if error else None


if __name__ == "__main__":
    main()
