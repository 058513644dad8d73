import json
import os
import re
from pathlib import Path
from typing import Annotated, Any, Self
from urllib.parse import urlsplit

from pydantic import (
    Field,
    ModelWrapValidatorHandler,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from storage.errors import SettingsError
from storage.limits import Limits, TenantLimit

PREFIX = "PLATEMAKER_"


def _default_data_dir() -> Path:
    return Path(os.environ.get("XDG_DATA_HOME") or "~/.local/share") / "platemaker"


class FloorSettings(BaseSettings):
    """What the settings of a floor share: PLATEMAKER_* variables over `platemaker.toml`, errors that name the variable.

    The floor of the kernels has its own copy: it does not know this one.
    """

    # Inputs stay out of error messages: they can be secrets.
    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        env_ignore_empty=True,
        extra="ignore",
        frozen=True,
        hide_input_in_errors=True,
        validate_default=True,
    )

    tls_ca_file: Path | None = Field(
        default=None,
        description="Certificates of your own authority, for broker, database, object store and traces (path, PEM). "
        "Default: those of the system.",
    )

    @field_validator("tls_ca_file")
    @classmethod
    def _is_there(cls, value: Path | None) -> Path | None:
        if value is not None and not value.is_file():
            raise ValueError("is not a file")
        return value

    @model_validator(mode="wrap")
    @classmethod
    def _name_the_variable(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return handler(data)
        except ValidationError as exc:
            lines = []
            for error in exc.errors(include_input=False):
                variable = f"{PREFIX}{str(error['loc'][0]).upper()}: " if error["loc"] else ""
                lines.append(variable + error["msg"].removeprefix("Value error, "))
            raise ValueError("; ".join(lines)) from None

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        named = os.environ.get(f"{PREFIX}CONFIG")
        if named and not Path(named).is_file():
            raise SettingsError(f"{PREFIX}CONFIG names {named}, which is not a file. Correct or unset it.")
        file = TomlConfigSettingsSource(settings_cls, Path(named or "platemaker.toml"))
        return init_settings, env_settings, file


class StorageSettings(FloorSettings):
    """Where things last. Environment variables win over `platemaker.toml`."""

    data_dir: Path = Field(
        default_factory=_default_data_dir,
        description="Folder for everything kept on this machine (path). "
        "Default: $XDG_DATA_HOME/platemaker, else ~/.local/share/platemaker.",
    )
    database_url: SecretStr | None = Field(
        default=None,
        description="Database (URL, sqlite:/// or postgresql://). Default: the file platemaker.db in the data folder.",
    )
    store_url: str | None = Field(
        default=None,
        description="Object store (URL: /folder, file:///folder or s3://bucket/prefix). "
        "Default: the folder objects in the data folder.",
    )
    s3_endpoint_url: str | None = Field(
        default=None,
        description="S3 server (URL, http:// or https://). Default: Amazon's for the region.",
    )
    s3_region: str = Field(default="us-east-1", pattern=r"^[A-Za-z0-9_-]+$", description="S3 region (name).")
    s3_access_key_id: SecretStr | None = Field(
        default=None,
        description="S3 access key id (text). Default: boto3's own search (profile, instance role).",
    )
    s3_secret_access_key: SecretStr | None = Field(default=None, description="S3 secret access key (text).")
    s3_max_connections: int = Field(
        default=16, ge=1, le=256, description="Connections of one process to the S3 server (count)."
    )
    patience_s: float = Field(
        default=60.0,
        ge=0,
        description="How long an object store or database that does not answer is asked again, before the work is "
        "given back (seconds).",
    )
    snapshot_ttl_s: float = Field(
        default=7 * 86400.0, gt=0, description="How long a snapshot is kept after its last use (seconds)."
    )
    snapshot_max_age_s: float = Field(
        default=90 * 86400.0, gt=0, description="How long a snapshot is kept at most, used or pinned (seconds)."
    )
    sweep_grace_s: float = Field(
        default=3600.0, ge=0, description="Age below which the sweep leaves chunks and objects alone (seconds)."
    )
    store_budget_mb: int | None = Field(
        default=None,
        ge=1,
        description="Most that snapshots may take; the least recently used go first (MB). Default: no limit.",
    )

    local_copies_mb: int = Field(
        default=4096,
        ge=0,
        description="Most that copies of an S3 store's chunks may take in the folder copies in the data folder; the "
        "least recently used go first (MB). 0: no copies.",
    )

    max_queued_items: int | None = Field(
        default=None,
        ge=0,
        description="Items that may wait or run, of all tenants; a job beyond it is refused (count). "
        "Default: no bound.",
    )
    tenant_limits: Annotated[dict[str, TenantLimit], NoDecode] = Field(
        default_factory=dict,
        description="What tenants may have at once, and their weights (JSON, or a table in the file): by tenant, * for "
        "all others, `running`, `queued_items` and `weight`. Default: no limits, equal weights.",
    )

    @field_validator("tenant_limits", mode="before")
    @classmethod
    def _read_json(cls, value: Any) -> Any:
        try:
            return json.loads(value) if isinstance(value, str) else value
        except ValueError:
            raise ValueError('must be JSON like {"*": {"running": 4}}') from None

    local_texts_mb: int = Field(
        default=0,
        ge=0,
        description="Most that copies of texts and manifests may take in the folder spare in the data folder, so that "
        "decode workers go on while an S3 store is away (MB). 0: no text is kept outside the store.",
    )

    @field_validator("data_dir")
    @classmethod
    def _absolute(cls, value: Path) -> Path:
        return value.expanduser().absolute()

    @field_validator("database_url")
    @classmethod
    def _known_database(cls, value: SecretStr | None) -> SecretStr | None:
        if value and not re.match(r"(sqlite|postgres|postgresql)(\+\w+)?://", value.get_secret_value()):
            raise ValueError("must begin with sqlite:// or postgresql://")
        return value

    @field_validator("store_url")
    @classmethod
    def _known_store(cls, value: str | None) -> str | None:
        if value and not re.fullmatch(r"(file://)?/[^/].*|s3://[a-z0-9][a-z0-9.-]+[a-z0-9](/[A-Za-z0-9_./-]*)?", value):
            raise ValueError("must be /folder, file:///folder or s3://bucket/prefix")
        return value

    @field_validator("s3_endpoint_url")
    @classmethod
    def _plain_endpoint(cls, value: str | None) -> str | None:
        if value and not re.fullmatch(r"https?://[^/@?#]+/?", value):
            raise ValueError("must be http://host:port or https://host:port, without keys or a path")
        return value

    @model_validator(mode="after")
    def _both_keys(self) -> Self:
        if (self.s3_access_key_id is None) != (self.s3_secret_access_key is None):
            raise ValueError(f"set both {PREFIX}S3_ACCESS_KEY_ID and {PREFIX}S3_SECRET_ACCESS_KEY, or neither")
        return self

    @property
    def limits(self) -> Limits:
        return Limits(self.tenant_limits, self.max_queued_items)

    def resolved_database_url(self) -> str:
        """The URL for SQLAlchemy, driver named. May hold a password: never show it."""
        if self.database_url is None:
            return f"sqlite:///{self.data_dir / 'platemaker.db'}"
        url = self.database_url.get_secret_value()
        return re.sub(r"^postgres(ql)?://", "postgresql+pg8000://", url)

    def safe_database_url(self) -> str:
        """The same URL to show: no user, password or options."""
        url = urlsplit(self.resolved_database_url())
        return f"{url.scheme}://{url.netloc.rpartition('@')[2]}{url.path}"

    def resolved_store_url(self) -> str:
        return self.store_url or str(self.data_dir / "objects")
