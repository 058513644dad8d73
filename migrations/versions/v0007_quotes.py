"""Answers may keep the words of the document that the model quoted for them."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("answers", sa.Column("quote_prompt", sa.String(16), nullable=True))
    op.add_column("answers", sa.Column("quote", sa.Text(), nullable=True))
    op.add_column("answers", sa.Column("quote_start", sa.Integer(), nullable=True))
    op.add_column("answers", sa.Column("quote_stop", sa.Integer(), nullable=True))


def downgrade() -> None:
    for name in ("quote_stop", "quote_start", "quote", "quote_prompt"):
        op.drop_column("answers", name)
