"""Long documents in sections."""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "sections",
        sa.Column("job_id", sa.String(32), nullable=False),
        sa.Column("document_id", sa.String(64), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("tenant", sa.String(), nullable=False),
        sa.Column("section_id", sa.String(64), nullable=False),
        sa.Column("start", sa.Integer(), nullable=False),
        sa.Column("stop", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("job_id", "document_id", "position", name="pk_sections"),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.job_id"], name="fk_sections_job_id_jobs", ondelete="CASCADE"),
    )
    for name in ("document_id", "section_id"):
        op.create_index(f"ix_sections_tenant_{name}", "sections", ["tenant", name])
    op.add_column("schedules", sa.Column("split", sa.String(16), server_default="refuse", nullable=False))


def downgrade() -> None:
    op.drop_column("schedules", "split")
    for name in ("section_id", "document_id"):
        op.drop_index(f"ix_sections_tenant_{name}", "sections")
    op.drop_table("sections")
