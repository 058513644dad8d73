"""Devices and models by name, from the TOML that ships with Platemaker or one of the user's own."""

import tomllib
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from pipeline.errors import PlanError

BF16_BYTES = 2


@dataclass(frozen=True)
class ModelShape:
    """What a model's arithmetic and memory traffic depend on."""

    parameters: float
    kv_bytes_per_token: float
    attention_width: float


@dataclass(frozen=True)
class Device:
    """Rates of one device with one model. Seconds of a step: `step_s + step_s_per_row * rows + step_s_per_token *
    cached + step_s_per_row_token * rows * cached`, where `cached` are the tokens of the document that the rows share.

    `origin` says where the rates come from: `measured`, or `derived` from published figures.
    """

    name: str
    origin: str
    prefill_s_per_token: float
    prefill_s_per_token2: float
    step_s: float
    step_s_per_row: float
    step_s_per_token: float
    step_s_per_row_token: float
    kv_bytes_per_token: float
    load_s_per_token: float = 0.0  # of what a decode worker does to load a snapshot, from the store that was measured
    document_overhead_s: float = 0.0
    answer_overhead_s: float = 0.0
    price_per_hour: float | None = None

    def prefill_s(self, tokens: float) -> float:
        return self.prefill_s_per_token * tokens + self.prefill_s_per_token2 * tokens * tokens


def derive(name: str, entry: dict[str, Any], model: ModelShape) -> Device:
    """Rates from peak arithmetic and bandwidth, each times the share of it that is assumed to be reached.

    2 operations a parameter and token (Kaplan et al., arXiv:2001.08361, section 2.1), 4 × width × length for attention,
    halved by the causal mask when a document is read; a step reads the weights once, and the shared KV once.
    """
    figures = {**entry.get("published", {}), **entry.get("derived", {})}
    try:
        flops = figures["peak_tflops_bf16"] * 1e12 * figures["prefill_efficiency"]
        bandwidth = figures["bandwidth_gb_per_s"] * 1e9 * figures["bandwidth_efficiency"]
    except KeyError as exc:
        raise PlanError(f"the profile of {name} lacks {exc.args[0]}") from exc
    return Device(
        name=name,
        origin="derived",
        prefill_s_per_token=2 * model.parameters / flops,
        prefill_s_per_token2=2 * model.attention_width / flops,
        step_s=model.parameters * BF16_BYTES / bandwidth,
        step_s_per_row=2 * model.parameters / flops,
        step_s_per_token=model.kv_bytes_per_token / bandwidth,
        step_s_per_row_token=4 * model.attention_width / flops,
        kv_bytes_per_token=model.kv_bytes_per_token,
        price_per_hour=entry.get("price_per_hour"),
    )


@dataclass(frozen=True)
class Profiles:
    devices: dict[str, dict[str, Any]]
    models: dict[str, ModelShape]

    def device(self, name: str, model: str) -> Device:
        """
        Raises:
            PlanError: the file has no such device or model, or its entry is incomplete.
        """
        entry = self.devices.get(name)
        if entry is None:
            raise PlanError(f"there is no device {name}; known are {', '.join(sorted(self.devices))}")
        if "measured" in entry:
            try:
                return Device(
                    name=name, origin="measured", price_per_hour=entry.get("price_per_hour"), **entry["measured"]
                )
            except TypeError as exc:
                raise PlanError(f"the measured rates of {name} are not complete ({exc}); measure again") from exc
        if model not in self.models:
            raise PlanError(f"there is no model {model}; known are {', '.join(sorted(self.models))}")
        return derive(name, entry, self.models[model])


def load_profiles(path: Path | None = None) -> Profiles:
    """The shipped profiles, with those of the file at `path` over and beside them.

    Raises:
        PlanError: the file cannot be read as profiles.
    """
    found = tomllib.loads((files("pipeline.planning") / "profiles.toml").read_text("utf-8"))
    if path is not None:
        try:
            own = tomllib.loads(path.read_text("utf-8"))
            found = {part: {**found[part], **own.get(part, {})} for part in found}
        except (OSError, ValueError) as exc:
            raise PlanError(f"{path} cannot be read as profiles ({exc})") from exc
    try:
        return Profiles(found["devices"], {name: ModelShape(**shape) for name, shape in found["models"].items()})
    except TypeError as exc:
        raise PlanError(f"{path} has a model whose entry is wrong ({exc})") from exc
