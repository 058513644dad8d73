"""What a tenant may have at once, and how much its work weighs."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from pydantic import BaseModel, ConfigDict, Field

EVERY_OTHER = "*"  # stands for the tenants that are not named


class TenantLimit(BaseModel):
    """`running`: documents read or answered at once; `queued_items`: items that wait or run. None: no limit. With twice
    the `weight` of others, a tenant is given twice as much when all have work."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    running: int | None = Field(None, ge=1)
    queued_items: int | None = Field(None, ge=0)
    weight: float = Field(1.0, gt=0)


@dataclass(frozen=True)
class Limits:
    """`queued_items` is of all tenants together."""

    tenants: Mapping[str, TenantLimit] = field(default_factory=dict)
    queued_items: int | None = None

    def of(self, tenant: str) -> TenantLimit:
        return self.tenants.get(tenant) or self.tenants.get(EVERY_OTHER) or TenantLimit()


NO_LIMITS = Limits()
