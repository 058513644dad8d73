"""Tiers of jobs; units of work, from which workers choose; what tenants were given; where snapshots came from."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for table in ("jobs", "schedules"):
        op.add_column(table, sa.Column("tier", sa.String(length=8), server_default="batch", nullable=False))
    op.add_column("answers", sa.Column("loaded_from", sa.String(length=8), nullable=True))
    op.create_table(
        "shares",
        sa.Column("tenant", sa.String(length=255), nullable=False),
        sa.Column("served_s", sa.Double(), nullable=False),
        sa.Column("served_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("tenant", name=op.f("pk_shares")),
    )
    op.create_table(
        "units",
        sa.Column("stage", sa.String(length=8), nullable=False),
        sa.Column("tenant", sa.String(length=255), nullable=False),
        sa.Column("document_id", sa.String(length=64), nullable=False),
        sa.Column("tier", sa.String(length=8), nullable=False),
        sa.Column("snapshot_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=True),
        sa.Column("since", sa.DateTime(timezone=True), nullable=False),
        sa.Column("asks", sa.Integer(), nullable=False),
        sa.Column("owner", sa.String(length=255), nullable=True),
        sa.Column("lease_until", sa.DateTime(timezone=True), nullable=True),
        sa.Column("begun_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("stage", "tenant", "document_id", name=op.f("pk_units")),
    )
    op.create_index(
        op.f("ix_units_stage_tier_tenant_since"), "units", ["stage", "tier", "tenant", "since"], unique=False
    )
    taken = sa.text("owner IS NOT NULL")
    op.create_index("ix_units_taken", "units", ["owner"], unique=False, sqlite_where=taken, postgresql_where=taken)


def downgrade() -> None:
    op.drop_table("units")
    op.drop_table("shares")
    op.drop_column("answers", "loaded_from")
    for table in ("schedules", "jobs"):
        op.drop_column(table, "tier")
