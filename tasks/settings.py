"""Settings of the floor that distributes work (PLATEMAKER_* variables, or platemaker.toml)."""

import os
from pathlib import Path

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, TomlConfigSettingsSource


class TaskSettings(BaseSettings):
    model_config = SettingsConfigDict(
        env_prefix="PLATEMAKER_", env_ignore_empty=True, extra="ignore", frozen=True, hide_input_in_errors=True
    )

    broker_url: SecretStr | None = Field(
        None, description="Broker (URL, redis:// or rediss://). Default: none; work then runs inside the one process."
    )
    lease_s: float = Field(
        30.0, gt=0, description="How long a silent worker keeps its work before another may take it (seconds)."
    )
    max_attempts: int = Field(3, ge=1, description="How often a worker may die on one piece of work (count).")
    upkeep_s: float = Field(5.0, gt=0, description="How often each worker looks for lost work (seconds).")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        toml = TomlConfigSettingsSource(settings_cls, Path(os.environ.get("PLATEMAKER_CONFIG", "platemaker.toml")))
        return init_settings, env_settings, toml
