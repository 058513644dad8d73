"""Platemaker's processes without the seconds that each spends on importing torch and transformers.

One process imports what they all import, computes nothing, and forks each of them: a process of its own, with its own
environment, that can be killed like any other. What concerns the start itself (the installed command, what `ps` shows)
is tested with commands that are really started: an `Installation` without this.
"""

import importlib
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
IMPORTED = (
    "boto3",
    "kernels.model",
    "pipeline.cli",
    "pipeline.run",
    "tasks.decode",
    "tasks.prefill",
    "tasks.worker",
    "tasks.engine",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama",
)
MESSAGE_BYTES = 1 << 20


class WarmProcess:
    """As much of a Popen as the tests need."""

    def __init__(self, warm: "Warm", pid: int, arguments: Sequence[str]) -> None:
        self.warm, self.pid, self.args = warm, pid, list(arguments)
        self.returncode: int | None = None
        self._ended = os.pidfd_open(pid)

    def poll(self) -> int | None:
        return self.returncode if self.returncode is not None else self._wait_for(0)

    def wait(self, timeout: float | None = None) -> int:
        code = self.returncode if self.returncode is not None else self._wait_for(timeout)
        if code is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(self.args, timeout)
        return code

    def _wait_for(self, timeout: float | None) -> int | None:
        ready, _, _ = select.select([self._ended], [], [], timeout)
        if not ready:
            return None
        os.close(self._ended)
        self.returncode = int(self.warm.ask({"wait": self.pid})["code"])
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


class Warm:
    """The process that has imported everything."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.system.warm", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
            )

    def start(
        self, arguments: Sequence[object], environment: Mapping[str, str], folder: Path, stdout: int, stderr: int
    ) -> WarmProcess:
        given = [str(each) for each in arguments]
        order = {"arguments": given, "environment": dict(environment), "folder": str(folder)}
        return WarmProcess(self, self.ask(order, stdout, stderr)["pid"], given)

    def ask(self, order: Mapping[str, Any], *files: int) -> Any:
        socket.send_fds(self._socket, [json.dumps(order).encode()], files)
        return json.loads(self._socket.recv(MESSAGE_BYTES))

    def close(self) -> None:
        self._socket.close()
        self._process.wait()


def serve(orders: socket.socket) -> None:
    """Returns in each process that is forked, and in this one when the tests are over."""
    for name in IMPORTED:
        importlib.import_module(name)
    while True:
        received, files, _, _ = socket.recv_fds(orders, MESSAGE_BYTES, 2)
        if not received:
            return
        order = json.loads(received)
        if "wait" in order:
            orders.send(json.dumps({"code": os.waitstatus_to_exitcode(os.waitpid(order["wait"], 0)[1])}).encode())
            continue
        pid = os.fork()
        if pid == 0:
            orders.close()
            _become(order, *files)
            return
        for each in files:
            os.close(each)
        orders.send(json.dumps({"pid": pid}).encode())


def _become(order: dict[str, Any], stdout: int, stderr: int) -> None:
    """Runs the command in this process, and leaves it as the command does."""
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    os.close(stdout)
    os.close(stderr)
    os.environ.clear()
    os.environ.update(order["environment"])
    time.tzset()
    os.chdir(order["folder"])
    random.seed()
    sys.argv = ["platemaker", *order["arguments"]]
    importlib.import_module("pipeline.cli").main()


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as given:
        serve(given)
