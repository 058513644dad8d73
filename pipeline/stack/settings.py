"""The settings that the stack's programs and other terminals share."""

import os
import secrets
from pathlib import Path

from kernels.settings import KernelSettings
from pipeline.local_servers import Postgres, SeaweedFS, Valkey
from pipeline.local_servers.process import write_private

BUCKET = "platemaker"


def kept_secret(path: Path) -> str:
    """The one in the file, which only its owner can read; made if there is none."""
    if not path.exists():
        write_private(path, secrets.token_urlsafe(24))
    return path.read_text()


def stack_settings(
    folder: Path, broker: Valkey, store: SeaweedFS, postgres: Postgres | None, *, flower_auth: str, workers: int
) -> dict[str, str]:
    """As environment variables. What is not named here comes from the settings of whoever runs `up`."""
    database_url = f"sqlite:///{folder / 'platemaker.db'}" if postgres is None else postgres.url
    settings = {
        "BROKER_URL": broker.url,
        "DATABASE_URL": database_url,
        "STORE_URL": store.url,
        "S3_ENDPOINT_URL": store.endpoint_url,
        "S3_ACCESS_KEY_ID": store.access_key_id,
        "S3_SECRET_ACCESS_KEY": store.secret_access_key,
        "FLOWER_AUTH": flower_auth,
        "MODEL": _absolute_model(),
    }
    threads = KernelSettings().threads or max(1, len(os.sched_getaffinity(0)) // workers)
    return {f"PLATEMAKER_{name}": value for name, value in {**settings, "THREADS": str(threads)}.items()}


def _absolute_model() -> str:
    """Other terminals are in other folders."""
    model = KernelSettings().model
    path = Path(model).expanduser()
    return str(path.absolute()) if path.exists() else model
