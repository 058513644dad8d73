"""Settings of the device floor (PLATEMAKER_* variables, or platemaker.toml)."""

import os
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)


def user_cache_dir() -> Path:
    """Folder for converted models and digests: $XDG_CACHE_HOME/platemaker or ~/.cache/platemaker."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "platemaker"


CodecName = Literal["none", "shuffle-zstd", "int8", "int4", "fp8"]


class KernelSettings(BaseSettings):
    model_config = SettingsConfigDict(env_prefix="PLATEMAKER_", extra="ignore", frozen=True, protected_namespaces=())

    model: str = Field(
        default_factory=lambda: str(user_cache_dir() / "models" / "smollm2-135m-instruct"),
        description="Model: a Hugging Face folder, a .gguf file, or a hub id.",
    )
    adapter: Path | None = Field(
        None,
        description="LoRA adapter: a folder of peft's with adapter_config.json and adapter_model.safetensors (path), "
        "merged into the model. Part of each snapshot's identity. Needs the extra `lora`.",
    )
    device: str = Field(
        "auto", description="Device: auto (musa, then cuda, then cpu), musa, cuda, cpu, or one card such as cuda:1."
    )
    cards: str = Field(
        "",
        pattern=r"^\s*([\w-]+\s*(,\s*[\w-]+\s*)*)?$",
        description="Cards that a process may see (numbers, such as 0 or 0,1), one for each rank; sets "
        "CUDA_VISIBLE_DEVICES and MUSA_VISIBLE_DEVICES. Default: what is visible.",
    )
    tensor_parallel: int = Field(
        1, ge=1, description="Cards that hold one model together, each a part of every layer (count)."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Compute and KV type. auto: bfloat16 where the device is fast at it, else float32."
    )
    threads: int = Field(0, ge=0, description="CPU threads for the model; 0: as many as the process may use.")
    chunk_tokens: int = Field(
        512, ge=16, description="Tokens computed at once in prefill, and tokens in one stored chunk."
    )
    codec: CodecName = Field(
        "none",
        description="How KV is stored: none or shuffle-zstd (exact), int8, fp8 or int4 (smaller, with a measured "
        "error). Part of each snapshot's identity.",
    )
    codec_max_error: float = Field(
        0.05,
        ge=0,
        description="Largest relative error of the logits that int8, fp8 and int4 may cause (ratio); "
        "a document beyond it is stored exactly.",
    )
    max_batch: int = Field(32, ge=1, description="Questions answered at the same time, of one or several documents.")
    system_prompt: str = Field(
        "You review documents. Answer the question using only the document, in one short sentence.",
        description="The instruction that precedes every document. Part of each snapshot's identity.",
    )
    plain_prompt: bool = Field(
        False,
        description="Ask a base model, which has no chat template, in plain text (Question: … Answer:) instead of "
        "refusing it.",
    )

    @field_validator("adapter", mode="before")
    @classmethod
    def _named_adapter(cls, value: object) -> object:
        """An empty variable is none."""
        return Path(value).expanduser() if isinstance(value, str) and value else value or None

    @property
    def model_name(self) -> str:
        """What jobs and workers call the model: a hub id as it is, otherwise the last part of the path; with an
        adapter, that of its path behind a plus sign."""
        is_hub_id = self.model.count("/") == 1 and not self.model.startswith((".", "/", "~"))
        name = self.model if is_hub_id else Path(self.model).name
        return name if self.adapter is None else f"{name}+{self.adapter.name}"

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
