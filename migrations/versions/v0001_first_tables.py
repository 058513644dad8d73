"""The first tables: documents, jobs with their sources, questions and items, answers, snapshots and chunks."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "chunks",
        sa.Column("chunk_key", sa.String(length=64), nullable=False),
        sa.Column("tenant", sa.String(length=255), nullable=False),
        sa.Column("num_tokens", sa.Integer(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("xxh3", sa.String(length=32), nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("chunk_key", name=op.f("pk_chunks")),
    )
    op.create_table(
        "documents",
        sa.Column("tenant", sa.String(length=255), nullable=False),
        sa.Column("document_id", sa.String(length=64), nullable=False),
        sa.Column("text_key", sa.Text(), nullable=False),
        sa.Column("num_chars", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("tenant", "document_id", name=op.f("pk_documents")),
    )
    op.create_table(
        "jobs",
        sa.Column("job_id", sa.String(length=32), nullable=False),
        sa.Column("tenant", sa.String(length=255), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("title", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("cancelled_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("job_id", name=op.f("pk_jobs")),
    )
    with op.batch_alter_table("jobs", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_jobs_tenant_created_at"), ["tenant", "created_at"], unique=False)

    op.create_table(
        "snapshots",
        sa.Column(
            "snapshot_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False
        ),
        sa.Column("tenant", sa.String(length=255), nullable=False),
        sa.Column("document_id", sa.String(length=64), nullable=False),
        sa.Column("fingerprint", sa.String(length=64), nullable=False),
        sa.Column("fields", sa.JSON(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("fence", sa.Integer(), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("owner", sa.String(length=255), nullable=True),
        sa.Column("lease_until", sa.DateTime(timezone=True), nullable=True),
        sa.Column("num_tokens", sa.Integer(), nullable=False),
        sa.Column("done_tokens", sa.Integer(), nullable=False),
        sa.Column("computed_tokens", sa.Integer(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("manifest_sha256", sa.String(length=64), nullable=True),
        sa.Column("prefill_s", sa.Double(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("ready_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("last_used_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("snapshot_id", name=op.f("pk_snapshots")),
        sa.UniqueConstraint(
            "tenant", "document_id", "fingerprint", name=op.f("uq_snapshots_tenant_document_id_fingerprint")
        ),
    )
    op.create_table(
        "items",
        sa.Column("item_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("job_id", sa.String(length=32), nullable=False),
        sa.Column("tenant", sa.String(length=255), nullable=False),
        sa.Column("document_id", sa.String(length=64), nullable=False),
        sa.Column("question_position", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("owner", sa.String(length=255), nullable=True),
        sa.Column("lease_until", sa.DateTime(timezone=True), nullable=True),
        sa.Column("kicked_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("error_code", sa.String(length=255), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.job_id"], name=op.f("fk_items_job_id_jobs"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("item_id", name=op.f("pk_items")),
        sa.UniqueConstraint(
            "job_id", "document_id", "question_position", name=op.f("uq_items_job_id_document_id_question_position")
        ),
    )
    with op.batch_alter_table("items", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_items_job_id_state"), ["job_id", "state"], unique=False)
        batch_op.create_index(batch_op.f("ix_items_owner"), ["owner"], unique=False)
        batch_op.create_index(batch_op.f("ix_items_state_lease_until"), ["state", "lease_until"], unique=False)
        batch_op.create_index(
            batch_op.f("ix_items_tenant_document_id_state"), ["tenant", "document_id", "state"], unique=False
        )

    op.create_table(
        "questions",
        sa.Column("job_id", sa.String(length=32), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("question_id", sa.Text(), nullable=False),
        sa.Column("title", sa.Text(), nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.Column("params", sa.JSON(), nullable=False),
        sa.Column("error_code", sa.String(length=255), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.job_id"], name=op.f("fk_questions_job_id_jobs"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "position", name=op.f("pk_questions")),
    )
    op.create_table(
        "readings",
        sa.Column("job_id", sa.String(length=32), nullable=False),
        sa.Column("document_id", sa.String(length=64), nullable=False),
        sa.Column("snapshot_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("way", sa.String(length=16), nullable=False),
        sa.Column("computed_tokens", sa.Integer(), nullable=False),
        sa.Column("reused_tokens", sa.Integer(), nullable=False),
        sa.Column("prefill_s", sa.Double(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.job_id"], name=op.f("fk_readings_job_id_jobs"), ondelete="CASCADE"),
        sa.ForeignKeyConstraint(
            ["snapshot_id"], ["snapshots.snapshot_id"], name=op.f("fk_readings_snapshot_id_snapshots")
        ),
        sa.PrimaryKeyConstraint("job_id", "document_id", name=op.f("pk_readings")),
    )
    op.create_table(
        "snapshot_chunks",
        sa.Column(
            "snapshot_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=False, nullable=False
        ),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("chunk_key", sa.String(length=64), nullable=False),
        sa.ForeignKeyConstraint(["chunk_key"], ["chunks.chunk_key"], name=op.f("fk_snapshot_chunks_chunk_key_chunks")),
        sa.ForeignKeyConstraint(
            ["snapshot_id"],
            ["snapshots.snapshot_id"],
            name=op.f("fk_snapshot_chunks_snapshot_id_snapshots"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("snapshot_id", "position", name=op.f("pk_snapshot_chunks")),
    )
    with op.batch_alter_table("snapshot_chunks", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_snapshot_chunks_chunk_key"), ["chunk_key"], unique=False)

    op.create_table(
        "sources",
        sa.Column("job_id", sa.String(length=32), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("tenant", sa.String(length=255), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("document_id", sa.String(length=64), nullable=True),
        sa.Column("page_starts", sa.JSON(), nullable=False),
        sa.Column("pages_without_text", sa.JSON(), nullable=False),
        sa.Column("error_code", sa.String(length=255), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.job_id"], name=op.f("fk_sources_job_id_jobs"), ondelete="CASCADE"),
        sa.ForeignKeyConstraint(
            ["tenant", "document_id"],
            ["documents.tenant", "documents.document_id"],
            name=op.f("fk_sources_tenant_document_id_documents"),
        ),
        sa.PrimaryKeyConstraint("job_id", "position", name=op.f("pk_sources")),
    )
    with op.batch_alter_table("sources", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_sources_tenant_document_id"), ["tenant", "document_id"], unique=False)

    op.create_table(
        "answers",
        sa.Column("item_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=False, nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.Column("finish", sa.String(length=16), nullable=False),
        sa.Column("snapshot_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=True),
        sa.Column("cached_tokens", sa.Integer(), nullable=False),
        sa.Column("question_tokens", sa.Integer(), nullable=False),
        sa.Column("output_tokens", sa.Integer(), nullable=False),
        sa.Column("first_token_s", sa.Double(), nullable=False),
        sa.Column("total_s", sa.Double(), nullable=False),
        sa.Column("worker", sa.String(length=255), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["item_id"], ["items.item_id"], name=op.f("fk_answers_item_id_items"), ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(
            ["snapshot_id"], ["snapshots.snapshot_id"], name=op.f("fk_answers_snapshot_id_snapshots")
        ),
        sa.PrimaryKeyConstraint("item_id", name=op.f("pk_answers")),
    )


def downgrade() -> None:
    op.drop_table("answers")
    with op.batch_alter_table("sources", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_sources_tenant_document_id"))

    op.drop_table("sources")
    with op.batch_alter_table("snapshot_chunks", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_snapshot_chunks_chunk_key"))

    op.drop_table("snapshot_chunks")
    op.drop_table("readings")
    op.drop_table("questions")
    with op.batch_alter_table("items", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_items_tenant_document_id_state"))
        batch_op.drop_index(batch_op.f("ix_items_state_lease_until"))
        batch_op.drop_index(batch_op.f("ix_items_owner"))
        batch_op.drop_index(batch_op.f("ix_items_job_id_state"))

    op.drop_table("items")
    op.drop_table("snapshots")
    with op.batch_alter_table("jobs", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_jobs_tenant_created_at"))

    op.drop_table("jobs")
    op.drop_table("documents")
    op.drop_table("chunks")
