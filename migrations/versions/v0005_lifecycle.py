"""The lifecycle of a job: a client's key, times, counts of its items, answers carried over, schedules."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

COUNTS = {
    "num_open": ("queued", "running"),
    "num_answered": ("answered",),
    "num_failed": ("failed",),
    "num_cancelled": ("cancelled",),
    "num_expired": ("expired",),
}
BIG_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
TIME = sa.DateTime(timezone=True)


def upgrade() -> None:
    op.add_column("jobs", sa.Column("client_key", sa.String(length=255), nullable=True))
    op.add_column("jobs", sa.Column("content_sha256", sa.String(length=64), nullable=True))
    op.add_column("jobs", sa.Column("not_before", TIME, nullable=True))
    op.add_column("jobs", sa.Column("answer_by", TIME, nullable=True))
    op.add_column("jobs", sa.Column("reuse_answers", sa.Boolean(), server_default=sa.false(), nullable=False))
    for name, states in COUNTS.items():
        op.add_column("jobs", sa.Column(name, sa.Integer(), server_default="0", nullable=False))
        listed = ", ".join(f"'{state}'" for state in states)
        op.execute(
            f"UPDATE jobs SET {name} = "
            f"(SELECT count(*) FROM items WHERE items.job_id = jobs.job_id AND items.state IN ({listed}))"
        )
    op.create_index(op.f("ix_jobs_tenant_client_key"), "jobs", ["tenant", "client_key"], unique=True)
    _create_partial_index("ix_jobs_unfinished", "jobs", ["answer_by"], "finished_at IS NULL")
    _create_partial_index("ix_items_waiting", "items", ["kicked_at", "item_id"], "state = 'queued'")
    op.add_column("answers", sa.Column("carried_from", BIG_ID, nullable=True))
    op.create_table(
        "schedules",
        sa.Column("schedule_id", BIG_ID, autoincrement=True, nullable=False),
        sa.Column("tenant", sa.String(length=255), nullable=False),
        sa.Column("name", sa.String(length=255), nullable=False),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("questions", sa.Text(), nullable=False),
        sa.Column("variables", sa.JSON(), nullable=False),
        sa.Column("params", sa.JSON(), nullable=False),
        sa.Column("reading", sa.JSON(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("at", sa.String(length=255), nullable=False),
        sa.Column("prefill_at", sa.String(length=255), nullable=True),
        sa.Column("time_zone", sa.String(length=255), nullable=False),
        sa.Column("answer_by_s", sa.Double(), nullable=True),
        sa.Column("created_at", TIME, nullable=False),
        sa.Column("active_since", TIME, nullable=False),
        sa.Column("paused_at", TIME, nullable=True),
        sa.PrimaryKeyConstraint("schedule_id", name=op.f("pk_schedules")),
        sa.UniqueConstraint("tenant", "name", name=op.f("uq_schedules_tenant_name")),
    )
    op.create_table(
        "schedule_runs",
        sa.Column("run_id", BIG_ID, autoincrement=True, nullable=False),
        sa.Column("schedule_id", BIG_ID, nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("occurrence", sa.String(length=32), nullable=False),
        sa.Column("due_at", TIME, nullable=False),
        sa.Column("owner", sa.String(length=255), nullable=True),
        sa.Column("lease_until", TIME, nullable=True),
        sa.Column("job_id", sa.String(length=32), nullable=True),
        sa.Column("finished_at", TIME, nullable=True),
        sa.Column("documents", sa.Integer(), nullable=False),
        sa.Column("new_items", sa.Integer(), nullable=False),
        sa.Column("carried_items", sa.Integer(), nullable=False),
        sa.Column("expected_finish_at", TIME, nullable=True),
        sa.Column("warning", sa.Text(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(
            ["schedule_id"],
            ["schedules.schedule_id"],
            name=op.f("fk_schedule_runs_schedule_id_schedules"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("run_id", name=op.f("pk_schedule_runs")),
        sa.UniqueConstraint(
            "schedule_id", "kind", "occurrence", name=op.f("uq_schedule_runs_schedule_id_kind_occurrence")
        ),
    )


def downgrade() -> None:
    op.drop_table("schedule_runs")
    op.drop_table("schedules")
    # Not in a batch: that makes the table anew, and dropping the old one would delete what refers to it.
    op.drop_column("answers", "carried_from")
    op.drop_index("ix_items_waiting", table_name="items")
    op.drop_index("ix_jobs_unfinished", table_name="jobs")
    op.drop_index(op.f("ix_jobs_tenant_client_key"), table_name="jobs")
    for name in (*COUNTS, "reuse_answers", "answer_by", "not_before", "content_sha256", "client_key"):
        op.drop_column("jobs", name)


def _create_partial_index(name: str, table: str, columns: list[str], condition: str) -> None:
    op.create_index(
        name, table, columns, unique=False, sqlite_where=sa.text(condition), postgresql_where=sa.text(condition)
    )
