import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, text

from kernels.settings import user_cache_dir
from pipeline.local_servers import Postgres, SeaweedFS, Valkey
from tests.system.warm import Warm, WarmProcess

PLATEMAKER = Path(sys.executable).with_name("platemaker")
SAMPLES = Path(__file__).resolve().parents[2] / "pipeline" / "samples"
MODEL = Path(os.environ.get("PLATEMAKER_TEST_MODEL", user_cache_dir() / "models" / "smollm2-135m-instruct"))
BROKER_DATABASES = itertools.count(1)  # a server has sixteen; each test takes a fresh one


Process = subprocess.Popen[bytes] | WarmProcess


@dataclass
class Installation:
    """Platemaker as a person has it: its settings in the environment, its commands as processes.

    With `warm` these are forked from a process that has imported what they import, see `Warm`.
    """

    environment: dict[str, str]
    folder: Path
    warm: Warm | None = None
    processes: list[Process] = field(default_factory=list)

    def command(
        self, *arguments: object, timeout_s: float = 180, under: Sequence[str] = ()
    ) -> subprocess.CompletedProcess[str]:
        if self.warm is not None and not under:
            return self._warm_command(self.warm, arguments, timeout_s)
        return subprocess.run(
            [*under, PLATEMAKER, *map(str, arguments)],
            env=self._whole_environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def _warm_command(
        self, warm: Warm, arguments: Sequence[object], timeout_s: float
    ) -> subprocess.CompletedProcess[str]:
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            process = warm.start(arguments, self._whole_environment, self.folder, out.fileno(), err.fileno())
            try:
                code = process.wait(timeout_s)
            except BaseException:
                process.kill()
                process.wait()
                raise
            said = []
            for file in (out, err):
                file.seek(0)
                said.append(file.read().decode())
        return subprocess.CompletedProcess(process.args, code, *said)

    @property
    def _whole_environment(self) -> dict[str, str]:
        return {**os.environ, **self.environment}

    def json(self, *arguments: object) -> Any:
        done = self.command(*arguments)
        assert done.stdout, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    def start(self, *arguments: str) -> Process:
        """A process that goes on; its output lies in a file beside it."""
        log = (self.folder / f"{arguments[0]}-{len(self.processes)}.log").open("wb")
        process: Process
        with log:
            if self.warm is not None:
                process = self.warm.start(arguments, self._whole_environment, self.folder, log.fileno(), log.fileno())
            else:
                process = subprocess.Popen(
                    [PLATEMAKER, *arguments],
                    env=self._whole_environment,
                    cwd=self.folder,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
        self.processes.append(process)
        return process

    def report(self, job_id: str) -> list[dict[str, Any]]:
        done = self.command("answers", job_id, "--format", "jsonl")
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    def wait_until(self, condition: Callable[[], bool], *, limit_s: float, what: str) -> float:
        began = time.monotonic()
        while not condition():
            assert time.monotonic() - began < limit_s, f"{what} took longer than {limit_s} s"
            time.sleep(0.2)
        return time.monotonic() - began

    def stop_all(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def new_database(server: Postgres, name: str) -> str:
    """Creates a database on the server; returns its URL."""
    engine = create_engine(server.url.replace("postgresql://", "postgresql+pg8000://"), isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name}"))
    engine.dispose()
    return f"{server.url.rpartition('/')[0]}/{name}"


@pytest.fixture
def real_model() -> Path:
    if not (MODEL / "config.json").exists():
        pytest.skip(f"no model in {MODEL}; run scripts/get_model or set PLATEMAKER_TEST_MODEL")
    return MODEL


@pytest.fixture
def laptop(tmp_path: Path, tiny_model: Path) -> Iterator[Installation]:
    """One machine with the embedded defaults and the tiny model."""
    installation = Installation(
        {"PLATEMAKER_DATA_DIR": str(tmp_path / "data"), "PLATEMAKER_MODEL": str(tiny_model)}, tmp_path
    )
    yield installation
    installation.stop_all()


@pytest.fixture(scope="session")
def warm() -> Iterator[Warm]:
    process = Warm()
    yield process
    process.close()


@pytest.fixture
def cluster(
    tmp_path: Path, valkey_server: Valkey, s3_server: SeaweedFS, postgres_server: Postgres, warm: Warm
) -> Iterator[Installation]:
    """Broker, object store and database as real servers, each empty for this test; no worker yet."""
    name = f"t{uuid.uuid4().hex[:12]}"
    installation = Installation(
        {
            "PLATEMAKER_DATA_DIR": str(tmp_path / "data"),
            "PLATEMAKER_BROKER_URL": f"{valkey_server.url.rpartition('/')[0]}/{next(BROKER_DATABASES)}",
            "PLATEMAKER_DATABASE_URL": new_database(postgres_server, name),
            "PLATEMAKER_STORE_URL": f"s3://{s3_server.bucket}/{name}",
            "PLATEMAKER_S3_ENDPOINT_URL": s3_server.endpoint_url,
            "PLATEMAKER_S3_ACCESS_KEY_ID": s3_server.access_key_id,
            "PLATEMAKER_S3_SECRET_ACCESS_KEY": s3_server.secret_access_key,
            "PLATEMAKER_LEASE_S": "8",
            "PLATEMAKER_UPKEEP_S": "1",
        },
        tmp_path,
        warm,
    )
    done = installation.command("db", "upgrade")
    assert done.returncode == 0, done.stderr
    yield installation
    installation.stop_all()
