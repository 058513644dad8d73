"""Settings of the floor that distributes work (PLATEMAKER_* variables, or platemaker.toml)."""

from typing import Self

from pydantic import Field, SecretStr, field_validator, model_validator

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
    fast_batch: int = Field(8, ge=1, description="Most questions of fast jobs that are answered at once (count).")
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
    visibility_timeout_s: int = Field(
        14_400, ge=1, description="How long the broker waits before it delivers a message again that is held (seconds)."
    )
    longest_task_s: int = Field(
        3600,
        ge=1,
        description="Longest that one task takes with your documents and devices; the broker's waiting and a worker's "
        "liveness are held against it (seconds).",
    )
    metrics_port: int = Field(
        0, ge=0, le=65535, description="Port of a worker's /metrics, /live and /ready (port). 0: none."
    )
    metrics_address: str = Field(
        "127.0.0.1", description="Address that they, and those of `platemaker exporter`, listen on (address)."
    )
    upkeep_s: float = Field(5.0, gt=0, description="How often each worker looks for lost work (seconds).")

    @field_validator("broker_url")
    @classmethod
    def _known_broker(cls, value: SecretStr | None) -> SecretStr | None:
        if value and not value.get_secret_value().startswith(("redis://", "rediss://")):
            raise ValueError("must begin with redis:// or rediss://")
        return value

    @model_validator(mode="after")
    def _outlasts_tasks(self) -> Self:
        if self.visibility_timeout_s < self.longest_task_s:
            raise ValueError(
                "PLATEMAKER_VISIBILITY_TIMEOUT_S is shorter than PLATEMAKER_LONGEST_TASK_S, so long tasks would be "
                "delivered twice; raise the one or lower the other"
            )
        return self
