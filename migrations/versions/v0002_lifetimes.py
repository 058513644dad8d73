"""Lifetimes of snapshots: expiry, pins, leases; lineage and tombstones."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

BIG_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.add_column("snapshots", sa.Column("claimed_at", sa.DateTime(timezone=True), nullable=True))
    op.add_column("snapshots", sa.Column("expires_at", sa.DateTime(timezone=True), nullable=True))
    op.add_column("snapshots", sa.Column("pinned", sa.Boolean(), server_default=sa.false(), nullable=False))
    op.create_index(op.f("ix_snapshots_state_expires_at"), "snapshots", ["state", "expires_at"], unique=False)
    op.create_table(
        "snapshot_leases",
        sa.Column("snapshot_id", BIG_ID, autoincrement=False, nullable=False),
        sa.Column("owner", sa.String(length=255), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["snapshot_id"],
            ["snapshots.snapshot_id"],
            name=op.f("fk_snapshot_leases_snapshot_id_snapshots"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("snapshot_id", "owner", name=op.f("pk_snapshot_leases")),
    )
    op.create_index(op.f("ix_snapshot_leases_owner"), "snapshot_leases", ["owner"], unique=False)
    op.create_table(
        "lineage",
        sa.Column("id", BIG_ID, autoincrement=True, nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("tenant", sa.String(length=255), nullable=False),
        sa.Column("document_id", sa.String(length=64), nullable=False),
        sa.Column("snapshot_id", BIG_ID, nullable=True),
        sa.Column("event", sa.String(length=16), nullable=False),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_lineage")),
    )
    op.create_index(op.f("ix_lineage_tenant_document_id"), "lineage", ["tenant", "document_id"], unique=False)
    op.create_table(
        "tombstones",
        sa.Column("id", BIG_ID, autoincrement=True, nullable=False),
        sa.Column("tenant", sa.String(length=255), nullable=False),
        sa.Column("document_id", sa.String(length=64), nullable=True),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("counts", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tombstones")),
    )
    op.create_index(op.f("ix_tombstones_tenant"), "tombstones", ["tenant"], unique=False)


def downgrade() -> None:
    op.drop_table("tombstones")
    op.drop_table("lineage")
    op.drop_table("snapshot_leases")
    op.drop_index(op.f("ix_snapshots_state_expires_at"), table_name="snapshots")
    # Not in a batch: that makes the table anew, and dropping the old one would delete what refers to it.
    op.drop_column("snapshots", "pinned")
    op.drop_column("snapshots", "expires_at")
    op.drop_column("snapshots", "claimed_at")
