"""Settings of the floor that distributes work (PLATEMAKER_* variables, or platemaker.toml)."""

from pydantic import Field, SecretStr, field_validator

from storage.settings import FloorSettings


class TaskSettings(FloorSettings):
    broker_url: SecretStr | None = Field(
        None, description="Broker (URL, redis:// or rediss://). Default: none; work then runs inside the one process."
    )
    documents_per_task: int = Field(
        16,
        ge=1,
        description="How many documents one decode task may answer, one after another or side by side (count).",
    )
    lease_s: float = Field(
        30.0, gt=0, description="How long a silent worker keeps its work before another may take it (seconds)."
    )
    max_attempts: int = Field(3, ge=1, description="How often a worker may die on one piece of work (count).")
    memory_cache_mb: int = Field(
        2048,
        ge=0,
        description="Memory of the device for snapshots that are answered side by side or kept for the next task (MB).",
    )
    soft_stop_s: float = Field(
        20.0, ge=0, description="How long a worker told to stop (SIGTERM) goes on with answers under way (seconds)."
    )
    upkeep_s: float = Field(5.0, gt=0, description="How often each worker looks for lost work (seconds).")

    @field_validator("broker_url")
    @classmethod
    def _known_broker(cls, value: SecretStr | None) -> SecretStr | None:
        if value and not value.get_secret_value().startswith(("redis://", "rediss://")):
            raise ValueError("must begin with redis:// or rediss://")
        return value
