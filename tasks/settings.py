"""Settings of the floor that distributes work (PLATEMAKER_* variables, or platemaker.toml)."""

import re
from typing import Self

from pydantic import Field, SecretStr, field_validator, model_validator

from storage.breaker import BreakerRule
from storage.settings import FloorSettings
from storage.ways import Mode
from tasks.traces import are_installed


class TaskSettings(FloorSettings):
    broker_url: SecretStr | None = Field(
        None, description="Broker (URL, redis:// or rediss://). Default: none; work then runs inside the one process."
    )
    mode: Mode = Field(
        Mode.AUTO,
        description="How documents come to their answers: split (one pool reads and stores, another answers), "
        "monolithic (who answers has read the document), or auto (the cheaper by what was measured, and in one piece "
        "where the split cannot be had); a job's own --mode wins.",
    )
    canary_percent: float = Field(
        0.0,
        ge=0,
        le=100,
        description="Share of the documents that go the split way although mode would not send them there (percent).",
    )
    overload_age_s: float = Field(
        3600.0,
        gt=0,
        description="How long a document may wait for the prefill pool before decode workers that have nothing else to "
        "do read it themselves (seconds).",
    )
    breaker_failures: int = Field(
        5,
        ge=1,
        description="Failures of the prefill pool, or of the object store as a worker sees it, with no success between "
        "them, from which it is left alone (count).",
    )
    breaker_window_s: float = Field(
        300.0, gt=0, description="Failures further apart than this are not counted together (seconds)."
    )
    breaker_cool_down_s: float = Field(
        30.0, gt=0, description="How long it is left alone before one tries it again (seconds)."
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
    traces_url: str | None = Field(
        None,
        description="Where traces go (URL of an OTLP/HTTP collector, such as http://127.0.0.1:4318/v1/traces). Needs "
        "the extra `traces`. Default: there are none.",
    )
    upkeep_s: float = Field(5.0, gt=0, description="How often each worker looks for lost work (seconds).")

    @property
    def breaker_rule(self) -> BreakerRule:
        return BreakerRule(self.breaker_failures, self.breaker_window_s, self.breaker_cool_down_s)

    @field_validator("broker_url")
    @classmethod
    def _known_broker(cls, value: SecretStr | None) -> SecretStr | None:
        if value and not value.get_secret_value().startswith(("redis://", "rediss://")):
            raise ValueError("must begin with redis:// or rediss://")
        return value

    @field_validator("traces_url")
    @classmethod
    def _can_be_sent(cls, value: str | None) -> str | None:
        if value is None:
            return None
        if not re.fullmatch(r"https?://[^/@?#\s]+/[^?#\s]+", value):
            raise ValueError("must be like http://host:port/v1/traces, without keys")
        if not are_installed():
            raise ValueError("traces need OpenTelemetry. Run: pip install 'platemaker[traces]', or unset it")
        return value

    @model_validator(mode="after")
    def _outlasts_tasks(self) -> Self:
        if self.visibility_timeout_s < self.longest_task_s:
            raise ValueError(
                "PLATEMAKER_VISIBILITY_TIMEOUT_S is shorter than PLATEMAKER_LONGEST_TASK_S, so long tasks would be "
                "delivered twice; raise the one or lower the other"
            )
        return self
