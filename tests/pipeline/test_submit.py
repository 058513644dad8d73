from pathlib import Path

from kernels.params import GenerationParams
from pipeline.documents import Normalise, ReadOptions
from pipeline.questions import Question
from pipeline.settings import PipelineSettings
from pipeline.submit import Submission, named_sources, submit
from storage.database import Database
from storage.job_report import job_report
from storage.objects import open_store
from storage.settings import StorageSettings
from tests.pipeline.made_files import LIMITATION, lines, pdf_file, scan, text_file
from tests.pipeline.test_archive import zipped


def submitted(*named: Path, reading: ReadOptions) -> tuple[Submission, list[str]]:
    """A job with one question over these files, and the names and states of its rows."""
    storage, settings = StorageSettings(), PipelineSettings()
    database, store = Database(storage), open_store(storage)
    database.upgrade()
    made = submit(
        database,
        store,
        settings=settings,
        model="none",
        files=named_sources(map(str, named), settings, storage),
        questions=[Question("q", "Q", "Why?")],
        options=GenerationParams(),
        reading=reading,
    )
    with database.reading() as session:
        rows = [f"{Path(row.source).name} {row.state}" for row in job_report(session, "default", made.job_id)]
    store.close()
    database.close()
    return made, rows


def test_an_archive_becomes_a_source_for_each_of_its_files(tmp_path: Path) -> None:
    path = text_file(tmp_path, zipped({"b.txt": b"bee", "a.xyz": b"?", "c.txt": b"bee"}), "night.zip")

    made, rows = submitted(path, reading=ReadOptions())

    assert rows == ["a.xyz unreadable", "b.txt queued", "c.txt queued"]
    assert (made.sources, made.documents, made.unreadable) == (3, 1, 1)


def test_copies_with_other_page_furniture_share_a_document_where_the_user_allows_it(tmp_path: Path) -> None:
    clauses = [f"{number}. {LIMITATION}" for number in range(1, 13)]
    copies = [
        text_file(
            tmp_path,
            "\f".join(
                "\n".join([head, *clauses[start : start + step], f"{start // step + 1}"])
                for start in range(0, 12, step)
            ),
            f"{head}.txt",
        )
        for head, step in (("Draft", 3), ("Final", 4))
    ]

    plain, _ = submitted(*copies, reading=ReadOptions())
    even, _ = submitted(*copies, reading=ReadOptions(normalise=Normalise.FURNITURE))

    assert (plain.documents, even.documents) == (2, 1)


def test_pages_without_text_are_told(tmp_path: Path) -> None:
    made, _ = submitted(pdf_file(tmp_path, lines("text"), scan, scan), reading=ReadOptions())

    assert len(made.notes) == 1
    assert "no text on 2 of its pages (scanned or blank): 2, 3." in made.notes[0]
