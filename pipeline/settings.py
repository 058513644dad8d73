"""Settings of the floor that people touch (PLATEMAKER_* variables, or platemaker.toml)."""

import os
import tomllib
from pathlib import Path

from pydantic import Field, SecretStr, field_validator

from kernels.settings import KernelSettings
from pipeline.documents import ParseLimits
from storage.errors import SettingsError
from storage.settings import FloorSettings, StorageSettings
from tasks.settings import TaskSettings


class PipelineSettings(FloorSettings):
    tenant: str = Field(
        "default",
        pattern=r"^[a-z0-9][a-z0-9_-]{0,62}$",
        description="Whose documents, snapshots and answers these are (lower-case name). "
        "Tenants see nothing of each other.",
    )
    parse_time_s: float = Field(60.0, gt=0, description="Longest time to read one file (seconds).")
    parse_memory_mb: int = Field(2048, ge=128, description="Most memory to read one file (MB).")
    parse_file_mb: int = Field(200, ge=1, description="Largest file to read (MB).")
    parse_workers: int = Field(
        default_factory=lambda: len(os.sched_getaffinity(0)), ge=1, description="Files read at the same time (count)."
    )

    price_per_device_hour: float | None = Field(
        None, ge=0, description="What an hour of a device costs (any currency). Default: costs unknown."
    )

    price_per_gb_month: float | None = Field(
        None, ge=0, description="What a GB kept in the store for 30 days costs. Default: not counted."
    )
    price_per_gb_transferred: float | None = Field(
        None, ge=0, description="What a GB put into or got from the store costs. Default: not counted."
    )

    flower_auth: SecretStr | None = Field(
        None, description="Who may open Flower (user:password). Default: a password made and shown at each start."
    )
    flower_address: str = Field("127.0.0.1", description="Address that Flower listens on (address).")
    flower_port: int = Field(5555, ge=1, le=65535, description="Port that Flower listens on (port).")
    flower_url_prefix: str = Field(
        "", pattern=r"^[A-Za-z0-9/_-]*$", description="Path under which a proxy shows Flower (path)."
    )

    @field_validator("flower_auth")
    @classmethod
    def _both_parts(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None and not all(value.get_secret_value().partition(":")):
            raise ValueError("must be user:password")
        return value

    @property
    def parse_limits(self) -> ParseLimits:
        return ParseLimits(
            time_s=self.parse_time_s,
            memory_bytes=self.parse_memory_mb * 2**20,
            max_file_bytes=self.parse_file_mb * 2**20,
        )


def check_settings_file(path: Path) -> None:
    """Refuses a settings file that names a setting no floor has: a misspelt one would otherwise be ignored in silence.

    Raises:
        SettingsError: with the names.
    """
    known: set[str] = set()
    for floor in (KernelSettings, StorageSettings, TaskSettings, PipelineSettings):
        known |= floor.model_fields.keys()
    unknown = sorted(tomllib.loads(path.read_text("utf-8")).keys() - known)
    if unknown:
        raise SettingsError(f"{path} names what is not a setting: {', '.join(unknown)}. README.md lists the settings.")
