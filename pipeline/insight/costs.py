"""What was used, in money: by tenant, job or document, beside two other ways to get the same answers."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pipeline.settings import PipelineSettings
from storage.charges import Usage


@dataclass(frozen=True)
class Prices:
    """In one currency, whichever. `hosted_*` are a hosted model's, per million tokens."""

    device_hour: float | None = None
    gb_month: float | None = None
    gb_transferred: float | None = None
    hosted_input: float | None = None
    hosted_output: float | None = None

    @classmethod
    def of(
        cls, settings: PipelineSettings, *, hosted_input: float | None = None, hosted_output: float | None = None
    ) -> "Prices":
        return cls(
            settings.price_per_device_hour,
            settings.price_per_gb_month,
            settings.price_per_gb_transferred,
            hosted_input,
            hosted_output,
        )


@dataclass(frozen=True)
class Charge:
    """`key` is the tenant's, job's or document's name. Costs are None where no price says what they would be.

    `reading_every_time` is what devices would have cost had every answer read its document again, at the rate at which
    documents were read; `hosted` the same tokens at the hosted prices, documents sent with every question.
    """

    key: str
    used: Usage
    device: float | None
    storage: float | None
    transfer: float | None
    reading_every_time: float | None
    hosted: float | None

    @property
    def total(self) -> float | None:
        known = [part for part in (self.device, self.storage, self.transfer) if part is not None]
        return sum(known) if known else None

    @property
    def tokens(self) -> int:
        """What a service that shares nothing would bill: questions, documents with each, and answers."""
        return self.used.input_tokens + self.used.cached_tokens + self.used.output_tokens

    @property
    def per_1000_tokens(self) -> float | None:
        return None if self.total is None or not self.tokens else 1000 * self.total / self.tokens

    def record(self) -> dict[str, Any]:
        return {
            "key": self.key,
            **asdict(self.used),
            "device_s": self.used.device_s,
            "cost_device": self.device,
            "cost_storage": self.storage,
            "cost_transfer": self.transfer,
            "cost_total": self.total,
            "cost_per_1000_tokens": self.per_1000_tokens,
            "cost_reading_every_time": self.reading_every_time,
            "cost_hosted": self.hosted,
        }


def charge(key: str, used: Usage, prices: Prices, *, prefill_s_per_token: float | None) -> Charge:
    """`prefill_s_per_token` is what reading took, over all that was read."""
    per_s = None if prices.device_hour is None else prices.device_hour / 3600
    again = None
    if per_s is not None and (prefill_s_per_token is not None or not used.cached_tokens):
        again = per_s * (used.cached_tokens * (prefill_s_per_token or 0.0) + used.decode_s)
    hosted = None
    if prices.hosted_input is not None and prices.hosted_output is not None:
        sent = used.input_tokens + used.cached_tokens
        hosted = (sent * prices.hosted_input + used.output_tokens * prices.hosted_output) / 1e6
    moved = used.loaded_bytes + used.stored_bytes
    return Charge(
        key=key,
        used=used,
        device=None if per_s is None else per_s * used.device_s,
        storage=None if prices.gb_month is None else prices.gb_month * used.stored_gb_months,
        transfer=None if prices.gb_transferred is None else prices.gb_transferred * moved / 1e9,
        reading_every_time=again,
        hosted=hosted,
    )


def charges(found: Mapping[str, Usage], prices: Prices) -> tuple[list[Charge], Charge]:
    """Each one's, the dearest first, and all together."""
    total = sum(found.values(), Usage())
    rate = total.prefill_s / total.computed_tokens if total.computed_tokens else None
    lines = [charge(key, used, prices, prefill_s_per_token=rate) for key, used in found.items()]
    lines.sort(key=lambda line: (-line.used.device_s, line.key))
    return lines, charge("total", total, prices, prefill_s_per_token=rate)
