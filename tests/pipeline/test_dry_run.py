"""What a job would take: counted as the model counts, nothing written."""

from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import func, select

from kernels.params import GenerationParams
from kernels.prompt import Prompter
from kernels.settings import KernelSettings
from pipeline.counting import CharacterCount, token_counter
from pipeline.documents import Document, ParseLimits, Split, read_documents
from pipeline.dry_run import Estimate, estimate
from pipeline.questions import Question
from pipeline.settings import PipelineSettings
from pipeline.splitting import splitter
from storage.database import Database
from storage.items import answer_item
from storage.schema import Base, JobRow, ReadingRow, SnapshotState
from storage.settings import StorageSettings
from storage.snapshots import find_or_create
from tests.storage.made_rows import NOW, answer, claim, fingerprint, source, submit

ASKED = [Question("q1", "", "When?"), Question("q2", "", "Who?"), Question("q3", "", "", error_code="e", error="E.")]


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    (tmp_path / "a.txt").write_text("The fee is due within 30 days. <|im_end|> Ümläute.")
    (tmp_path / "copy.txt").write_text("The fee is due within 30 days. <|im_end|> Ümläute.")
    (tmp_path / "b.txt").write_text("Another contract.")
    (tmp_path / "empty.txt").write_text("")
    return [tmp_path / name for name in ("a.txt", "copy.txt", "b.txt", "empty.txt")]


def look(tmp_path: Path, files: list[Path], kernel: KernelSettings, settings: PipelineSettings) -> Estimate:
    with closing(Database(StorageSettings(data_dir=tmp_path / "data"))) as database:
        database.upgrade()
        found = estimate(database, settings=settings, kernel=kernel, files=files, questions=ASKED)
        with database.reading() as session:
            rows = [session.scalar(select(func.count()).select_from(table)) for table in Base.metadata.sorted_tables]
    assert not any(rows)
    return found


def test_documents_are_counted_as_the_model_counts_them(tmp_path: Path, files: list[Path], tiny_model: Path) -> None:
    kernel = KernelSettings(model=str(tiny_model))

    found = look(tmp_path, files, kernel, PipelineSettings())

    prompter, counter = Prompter(tiny_model, kernel.system_prompt), token_counter(kernel)
    texts = [files[0].read_text(), files[2].read_text()]
    empty = len(prompter.prefix_ids(""))
    assert [counter.count(text) for text in texts] == [len(prompter.prefix_ids(text)) - empty for text in texts]
    assert (found.files, found.unreadable, found.documents, found.answers) == (4, 1, 2, 4)
    assert (found.prefills, found.prefills_saved, found.tokens_are_estimated) == (2, 0, False)
    assert found.tokens == found.prefill_tokens >= sum(counter.count(text) for text in texts)
    assert found.seconds is None and "unknown" in "\n".join(found.lines())


def test_a_long_document_is_counted_by_its_sections(tmp_path: Path, tiny_model: Path) -> None:
    kernel = KernelSettings(model=str(tiny_model))
    cutting = splitter(Split.SECTIONS, kernel, ASKED, GenerationParams())
    assert cutting is not None
    text = "".join(f"The fee {number} is due. " for number in range(cutting.max_tokens // 8)).strip()
    (tmp_path / "long.txt").write_text(text)

    with closing(Database(StorageSettings(data_dir=tmp_path / "data"))) as database:
        database.upgrade()
        files = [tmp_path / "long.txt"]
        settings = PipelineSettings()
        found = estimate(database, settings=settings, kernel=kernel, files=files, questions=ASKED, splitter=cutting)

    sections = len(cutting.sections(text))
    assert sections > 2
    assert (found.documents, found.prefills, found.answers) == (1, sections, 2 * sections)
    assert found.tokens > token_counter(kernel).count(text)  # what overlaps is read twice


def test_where_the_model_does_not_lie_here_tokens_are_an_estimate_and_said_to_be(
    tmp_path: Path, files: list[Path]
) -> None:
    found = look(tmp_path, files, KernelSettings(model=str(tmp_path / "elsewhere")), PipelineSettings())

    assert isinstance(token_counter(KernelSettings(model="some/hub-id")), CharacterCount)
    assert found.tokens_are_estimated and "about" in found.lines()[1]


def test_seconds_and_cost_come_from_measured_work_and_ready_snapshots_save_their_prefill(
    tmp_path: Path, files: list[Path]
) -> None:
    kernel = KernelSettings(model=str(tmp_path / "elsewhere"))
    settings = PipelineSettings(price_per_device_hour=36.0)
    cold = look(tmp_path, files, kernel, settings)
    with closing(Database(StorageSettings(data_dir=tmp_path / "past"))) as database:
        database.upgrade()
        known = _document_id(files[0])
        job_id = submit(database, sources=[source(known)], questions=1, tenant="default", model=kernel.model_name)
        (item,) = claim(database, document_id=known, tenant="default", model=kernel.model_name)
        with database.writing() as session:  # 10 tokens a second read, 2 a second written, 4 tokens an answer
            given = answer(output_tokens=4, total_s=2.0)
            answer_item(session, item.item_id, owner="worker-1", answer=given, now=NOW)
            row = find_or_create(session, fingerprint(tenant="default", document_id=known), num_tokens=100, now=NOW)
            row.state = SnapshotState.READY
            session.add(
                ReadingRow(
                    job_id=job_id,
                    document_id=known,
                    snapshot_id=row.snapshot_id,
                    way="computed",
                    computed_tokens=100,
                    reused_tokens=0,
                    prefill_s=10.0,
                    created_at=NOW,
                )
            )
        found = estimate(database, settings=settings, kernel=kernel, files=files, questions=ASKED)
        with database.reading() as session:
            assert session.scalar(select(func.count()).select_from(JobRow)) == 1

    assert (found.prefills, found.prefills_saved) == (1, 1)
    assert 0 < found.prefill_tokens < cold.prefill_tokens
    assert found.seconds == pytest.approx(found.prefill_tokens / 10 + found.answers * 4 / 2)
    assert found.cost == pytest.approx(found.seconds / 100)


def _document_id(path: Path) -> str:
    _, document = next(iter(read_documents([path], limits=ParseLimits(), workers=1)))
    assert isinstance(document, Document)
    return document.document_id
