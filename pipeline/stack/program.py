"""One of our own commands as a process of the stack."""

import os
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path

from pipeline.local_servers import LocalServer
from pipeline.local_servers.process import HOST

ANSWER_S = 2.0


class Program(LocalServer):
    """Ready when `ready_path` on its port answers 200. Its settings are in its environment, never on its command
    line, which every user of the machine can read."""

    name = "program"
    grace_s = 60.0  # a worker ends the answer it is at

    def __init__(
        self,
        folder: Path,
        name: str,
        arguments: list[str],
        settings: Mapping[str, str],
        *,
        port_setting: str,
        ready_path: str,
        port: int | None = None,
    ) -> None:
        self.name = name  # type: ignore[misc] # of each its own
        super().__init__(folder)
        self.port = port or self.port
        self._arguments = arguments
        self._settings = {**settings, port_setting: str(self.port)}
        self._ready_path = ready_path

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def _command(self) -> list[str | Path]:
        return [sys.executable, "-m", "pipeline", *self._arguments]

    def _working_folder(self) -> Path:
        return Path.cwd()  # where platemaker.toml and relative paths are

    def _environment(self) -> dict[str, str]:
        return {**os.environ, **self._settings, "PYTHONUNBUFFERED": "1"}

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}{self._ready_path}", timeout=ANSWER_S) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False
