"""Submitting a job: files and questions become rows, in one transaction, then the queue is kicked."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from kernels.architecture import check_architecture, read_config
from kernels.params import GenerationParams
from kernels.settings import KernelSettings
from pipeline.documents import AS_USUAL, Document, ReadOptions, Source, find_sources, read_documents
from pipeline.questions import Question
from pipeline.settings import PipelineSettings
from pipeline.splitting import Splitter
from storage.database import Database, utc_now
from storage.documents import put_text
from storage.jobs import ANY_TIME, JobTimes, NewQuestion, NewSource, create_job, new_job_id
from storage.limits import NO_LIMITS, Limits
from storage.objects import ObjectStore, open_bucket
from storage.queue_bound import refuse_if_full
from storage.settings import StorageSettings
from storage.tiers import Tier
from storage.ways import Mode
from tasks.traces import Span, send, send_root


@dataclass(frozen=True)
class Submission:
    """What was submitted, in numbers. `split` documents are read in `sections`. `notes` are sentences on what was left
    out of files that could be read, and on what is read in sections."""

    job_id: str
    sources: int
    documents: int
    unreadable: int
    questions: int
    split: int = 0
    sections: int = 0
    notes: tuple[str, ...] = ()


def named_sources(named: Iterable[str], settings: PipelineSettings, storage: StorageSettings) -> list[Source]:
    """Every file that is meant; buckets are read with the server and the keys of the store.

    Raises:
        ObjectStoreError: a bucket cannot be listed.
    """
    return find_sources(named, limits=settings.parse_limits, open_bucket=lambda bucket: open_bucket(storage, bucket))


def refuse_unsupported_model(settings: KernelSettings) -> None:
    """Looks at the model's configuration where it lies on this machine; a submit host need not have it.

    Raises:
        ModelUnsupported: its KV cannot be cut behind a document.
    """
    folder = Path(settings.model).expanduser()
    if folder.is_dir():
        check_architecture(settings.model_name, read_config(folder))


def submit(
    database: Database,
    store: ObjectStore,
    *,
    settings: PipelineSettings,
    model: str,
    files: Sequence[Path | Source],
    questions: list[Question],
    options: GenerationParams,
    reading: ReadOptions = AS_USUAL,
    title: str = "",
    client_key: str | None = None,
    times: JobTimes = ANY_TIME,
    tier: Tier = Tier.BATCH,
    limits: Limits = NO_LIMITS,
    reuse_answers: bool = False,
    only_prefill: bool = False,
    mode: Mode | None = None,
    splitter: Splitter | None = None,
    on_read: Callable[[int], None] = lambda _index: None,
) -> Submission:
    """Reads the files (each in a child process), stores their texts and writes the job.

    A file or question that cannot be used becomes a row with its error and stops no other. `on_read(index)` is
    called after each file. `splitter` cuts what is too long. The options before it are those of `create_job`.

    Raises:
        KeyTaken: `client_key` was used for other content.
        QueueFull: the limits leave no room for so many items.
    """
    whole = Span("submit")
    with database.reading() as session:
        refuse_if_full(session, settings.tenant, limits, client_key=client_key)
    reading_files = Span("read documents")
    sources: list[NewSource] = []
    notes: list[str] = []
    outcomes = read_documents(files, limits=settings.parse_limits, workers=settings.parse_workers, options=reading)
    for index, outcome in outcomes:
        name = str(files[index])
        if isinstance(outcome, Document):
            notes += [f"{name}: {note}" for note in (*_pages_note(outcome.pages_without_text), *outcome.notes)]
            put_text(store, settings.tenant, outcome.document_id, outcome.text)
            sections = splitter.sections(outcome.text) if splitter else ()
            for section, text in sections:
                put_text(store, settings.tenant, section.document_id, text)
            if sections:
                notes.append(f"{name}: longer than the model's context, so it is read in {len(sections)} sections.")
            sources.append(
                NewSource(
                    name=name,
                    document_id=outcome.document_id,
                    num_chars=len(outcome.text),
                    page_starts=outcome.page_starts,
                    pages_without_text=outcome.pages_without_text,
                    sections=tuple(section for section, _ in sections),
                )
            )
        else:
            sources.append(NewSource(name=name, error_code=outcome.code, error=str(outcome)))
        on_read(index)
    reading_files.end()
    new_id = new_job_id()
    with database.writing() as session:
        job_id = create_job(
            session,
            tenant=settings.tenant,
            model=model,
            title=title,
            sources=sources,
            questions=[_new_question(question, options) for question in questions],
            now=utc_now(),
            client_key=client_key,
            times=times,
            tier=tier,
            limits=limits,
            reuse_answers=reuse_answers,
            only_prefill=only_prefill,
            mode=mode,
            job_id=new_id,
        )
    made = Submission(
        job_id=job_id,
        sources=len(sources),
        documents=len({source.document_id for source in sources if source.document_id}),
        unreadable=sum(source.error is not None for source in sources),
        questions=len(questions),
        split=len({source.document_id for source in sources if source.sections}),
        sections=len({section.document_id for source in sources for section in source.sections}),
        notes=tuple(notes),
    )
    reading_files.note(files=made.sources, unreadable=made.unreadable, documents=made.documents, sections=made.sections)
    whole.note(documents=made.documents, questions=made.questions, tier=tier, repeated=job_id != new_id)
    if job_id == new_id:
        send_root(whole, job_id)
    else:  # submitted before, under the same key
        send(whole, job_id)
    send(reading_files, job_id)
    return made


def _pages_note(pages: tuple[int, ...]) -> list[str]:
    if not pages:
        return []
    shown = ", ".join(map(str, pages[:20])) + (" …" if len(pages) > 20 else "")
    return [f"no text on {len(pages)} of its pages (scanned or blank): {shown}. No answer can come from them."]


def _new_question(question: Question, options: GenerationParams) -> NewQuestion:
    params = asdict(options)
    params["max_new_tokens"] = question.max_tokens or options.max_new_tokens
    params["min_new_tokens"] = min(options.min_new_tokens, params["max_new_tokens"])
    params["quote"] = options.quote or question.quote
    params["stop"] = [*options.stop, *question.stop]
    if question.choices or question.regex is not None or question.json_schema is not None:
        # Such an answer ends by itself; what the command says of ends is for the other questions.
        own = {"choices": list(question.choices), "regex": question.regex, "json_schema": question.json_schema}
        params |= {**own, "stop": [], "stop_token_ids": []}
    return NewQuestion(
        question_id=question.question_id,
        title=question.title,
        text=question.text,
        params=params,
        error_code=question.error_code,
        error=question.error,
        spec=question.spec.record(),
    )
