"""The way from a document to its answers, and why; circuit breakers; how fast puts were."""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

NULLABLE = {
    "jobs": {"mode": sa.String(length=16)},
    "documents": {"sent_way": sa.String(length=16), "sent_why": sa.String(length=32)},
    "snapshots": {"put_s": sa.Double(), "put_bytes": sa.BigInteger()},
}


def upgrade() -> None:
    for table, columns in NULLABLE.items():
        for name, kind in columns.items():
            op.add_column(table, sa.Column(name, kind, nullable=True))
    # Until now every answer came from a stored snapshot, because there was no other way.
    op.add_column("answers", sa.Column("way", sa.String(length=16), server_default="split", nullable=False))
    op.add_column("answers", sa.Column("why", sa.String(length=32), server_default="mode", nullable=False))
    op.create_table(
        "breakers",
        sa.Column("name", sa.String(length=32), nullable=False),
        sa.Column("failures", sa.Integer(), nullable=False),
        sa.Column("failing_since", sa.DateTime(timezone=True), nullable=True),
        sa.Column("opened_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("probing_until", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_breakers")),
    )


def downgrade() -> None:
    op.drop_table("breakers")
    op.drop_column("answers", "why")
    op.drop_column("answers", "way")
    for table, columns in reversed(NULLABLE.items()):
        for name in reversed(columns):
            op.drop_column(table, name)
