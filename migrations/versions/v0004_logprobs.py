"""Answers may keep the logarithms of their tokens' probabilities."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("answers", sa.Column("logprobs", sa.JSON(), nullable=True))


def downgrade() -> None:
    op.drop_column("answers", "logprobs")
