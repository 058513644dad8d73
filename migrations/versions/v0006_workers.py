"""Workers that are alive, and pings through the queues."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "workers",
        sa.Column("worker", sa.String(length=255), nullable=False),
        sa.Column("pool", sa.String(length=16), nullable=False),
        sa.Column("queues", sa.JSON(), nullable=False),
        sa.Column("version", sa.String(length=255), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("engine_sha256", sa.String(length=64), nullable=False),
        sa.Column("clock_ahead_s", sa.Double(), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("seen_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("worker", name=op.f("pk_workers")),
    )
    op.create_table(
        "pings",
        sa.Column("ping_id", sa.String(length=32), nullable=False),
        sa.Column("queue", sa.String(length=255), nullable=False),
        sa.Column("sent_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("worker", sa.String(length=255), nullable=True),
        sa.Column("answered_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("ping_id", name=op.f("pk_pings")),
    )
    op.create_index(op.f("ix_pings_sent_at"), "pings", ["sent_at"], unique=False)


def downgrade() -> None:
    op.drop_index(op.f("ix_pings_sent_at"), table_name="pings")
    op.drop_table("pings")
    op.drop_table("workers")
