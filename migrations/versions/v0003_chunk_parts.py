"""Chunks are read and proved part by part."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("chunks", sa.Column("parts", sa.JSON(), nullable=True))


def downgrade() -> None:
    op.drop_column("chunks", "parts")
