"""What answers cost: device seconds, shares of the reading, loads."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

ANSWERS = {"device_s": sa.Double(), "prefill_s": sa.Double(), "load_s": sa.Double(), "load_bytes": sa.BigInteger()}


def upgrade() -> None:
    for name, kind in ANSWERS.items():
        op.add_column("answers", sa.Column(name, kind, server_default="0", nullable=False))
    op.add_column("readings", sa.Column("num_items", sa.Integer(), server_default="0", nullable=False))


def downgrade() -> None:
    op.drop_column("readings", "num_items")
    for name in reversed(ANSWERS):
        op.drop_column("answers", name)
