import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.local_servers import Postgres, SeaweedFS, Valkey, postgres, seaweedfs, valkey

KEPT_VARIABLES = {"PLATEMAKER_SHARED_DATA", "PLATEMAKER_TEST_MODEL"}


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [*os.environ]:
        if name.startswith("PLATEMAKER_") and name not in KEPT_VARIABLES:
            monkeypatch.delenv(name)
    monkeypatch.setenv("PLATEMAKER_DATA_DIR", str(tmp_path / "platemaker"))


@pytest.fixture(scope="session")
def valkey_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Valkey]:
    with valkey(tmp_path_factory.mktemp("valkey")) as server:
        yield server


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedFS]:
    with seaweedfs(tmp_path_factory.mktemp("s3"), "platemaker") as server:
        yield server


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[Postgres]:
    # Not pytest's folder: only root may enter it, and PostgreSQL then runs as another user.
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o711)
        with postgres(Path(folder) / "postgres") as server:
            yield server


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The real contracts, which are not part of the project."""
    default = Path(__file__).resolve().parents[2] / "shared" / "data"
    folder = Path(os.environ.get("PLATEMAKER_SHARED_DATA", default))
    if not folder.is_dir():
        pytest.skip(f"no real contracts in {folder}; set PLATEMAKER_SHARED_DATA to their folder")
    return folder
