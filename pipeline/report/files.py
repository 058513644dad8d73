"""Reports as files: the format is the file's ending, and one pass over the answers writes them all."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import IO

from pipeline.report.beside import lines_beside
from pipeline.report.formats import Format, format_of
from pipeline.report.page_sink import PageSink
from pipeline.report.rows import ReportLine
from pipeline.report.sink import Heading, Sink, fresh_path
from pipeline.report.summary import Summary, Tally, summary_of
from pipeline.report.text_sinks import CsvSink, JsonlSink, MarkdownSink, open_text
from storage.database import Database
from storage.job_report import job_questions
from storage.objects import ObjectStore
from storage.progress import job_status
from tasks.traces import span


def write_reports(
    database: Database,
    store: ObjectStore,
    tenant: str,
    job_id: str,
    paths: Sequence[Path],
    *,
    formats: Iterable[Format] | None = None,
    bom: bool = True,
    on_line: Callable[[ReportLine], None] = lambda _line: None,
) -> Summary:
    """Writes every file from one pass over the job's rows; each appears whole, or the old one stays.

    `formats` are theirs in order, where the endings do not say. `bom`: CSV begins with a byte order mark, by which
    spreadsheet programs know UTF-8.

    Raises:
        JobMissing: this tenant has no such job.
        UnknownFormat: no report has the ending of one of the paths.
    """
    kinds = list(formats) if formats is not None else [format_of(path) for path in paths]
    heading, tally = _heading(database, tenant, job_id), Tally()
    with span("report", job_id, files=len(paths)) as told, ExitStack() as stack:
        sinks = []
        for path, kind in zip(paths, kinds, strict=True):
            path.parent.mkdir(parents=True, exist_ok=True)
            fresh = fresh_path(path)
            stack.callback(fresh.unlink, missing_ok=True)
            sink = _open(fresh, kind, heading, stack, bom=bom)
            stack.callback(sink.close)
            sinks.append(sink)
        for found in stack.enter_context(lines_beside(database, store, tenant, job_id, documents=heading.sources)):
            tally.add(found.line)
            on_line(found.line)
            for sink in sinks:
                sink.add(found)
        summary = summary_of(database, tenant, job_id, tally)
        for sink in sinks:
            sink.finish(summary, tally)
        for path in paths:
            fresh_path(path).replace(path)
        told.note(rows=summary.rows, answered=summary.answered)
    return summary


def stream_report(
    database: Database, store: ObjectStore, tenant: str, job_id: str, kind: Format, file: IO[str]
) -> None:
    """Writes a report of any format but XLSX to an open file, such as standard output.

    Raises:
        JobMissing: this tenant has no such job.
    """
    heading, tally = _heading(database, tenant, job_id), Tally()
    with (
        span("report", job_id, format=kind) as told,
        closing(text_sink(file, kind, heading)) as sink,
        lines_beside(database, store, tenant, job_id, documents=heading.sources) as lines,
    ):
        for found in lines:
            tally.add(found.line)
            sink.add(found)
        summary = summary_of(database, tenant, job_id, tally)
        sink.finish(summary, tally)
        told.note(rows=summary.rows, answered=summary.answered)


def _heading(database: Database, tenant: str, job_id: str) -> Heading:
    with database.reading() as session:
        job = job_status(session, tenant, job_id)
        return Heading(job, job_questions(session, tenant, job_id), job.sources)


def _open(path: Path, kind: Format, heading: Heading, stack: ExitStack, *, bom: bool) -> Sink:
    if kind == Format.XLSX:
        from pipeline.report.xlsx_sink import XlsxSink  # only now: the library is not needed for the others

        return XlsxSink(path, heading)
    return text_sink(stack.enter_context(open_text(path, bom=bom and kind == Format.CSV)), kind, heading)


def text_sink(file: IO[str], kind: Format, heading: Heading) -> Sink:
    match kind:
        case Format.CSV:
            return CsvSink(file)
        case Format.JSONL:
            return JsonlSink(file)
        case Format.MD:
            return MarkdownSink(file, heading)
    return PageSink(file, heading)
