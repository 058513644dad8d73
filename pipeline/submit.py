"""Submitting a job: files and questions become rows, in one transaction, then the queue is kicked."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from kernels.architecture import check_architecture, read_config
from kernels.params import GenerationParams
from kernels.settings import KernelSettings
from pipeline.documents import Document, read_documents
from pipeline.questions import Question
from pipeline.settings import PipelineSettings
from storage.database import Database, utc_now
from storage.documents import put_text
from storage.jobs import ANY_TIME, JobTimes, NewQuestion, NewSource, create_job
from storage.objects import ObjectStore


@dataclass(frozen=True)
class Submission:
    """What was submitted, in numbers."""

    job_id: str
    sources: int
    documents: int
    unreadable: int
    questions: int


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
    files: list[Path],
    questions: list[Question],
    options: GenerationParams,
    names: list[str] | None = None,
    title: str = "",
    client_key: str | None = None,
    times: JobTimes = ANY_TIME,
    reuse_answers: bool = False,
    only_prefill: bool = False,
    on_read: Callable[[int], None] = lambda _index: None,
) -> Submission:
    """Reads the files (each in a child process), stores their texts and writes the job.

    A file or question that cannot be used becomes a row with its error and stops no other. `on_read(index)` is
    called after each file. `names` are what reports call the files; default: their paths. The other options are those
    of `create_job`.

    Raises:
        KeyTaken: `client_key` was used for other content.
    """
    sources: list[NewSource] = []
    for index, outcome in read_documents(files, limits=settings.parse_limits, workers=settings.parse_workers):
        name = str(files[index]) if names is None else names[index]
        if isinstance(outcome, Document):
            put_text(store, settings.tenant, outcome.document_id, outcome.text)
            sources.append(
                NewSource(
                    name=name,
                    document_id=outcome.document_id,
                    num_chars=len(outcome.text),
                    page_starts=outcome.page_starts,
                    pages_without_text=outcome.pages_without_text,
                )
            )
        else:
            sources.append(NewSource(name=name, error_code=outcome.code, error=str(outcome)))
        on_read(index)
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
            reuse_answers=reuse_answers,
            only_prefill=only_prefill,
        )
    return Submission(
        job_id=job_id,
        sources=len(sources),
        documents=len({source.document_id for source in sources if source.document_id}),
        unreadable=sum(source.error is not None for source in sources),
        questions=len(questions),
    )


def _new_question(question: Question, options: GenerationParams) -> NewQuestion:
    params = asdict(options)
    params["max_new_tokens"] = question.max_tokens or options.max_new_tokens
    params["stop"] = [*options.stop, *question.stop]
    return NewQuestion(
        question_id=question.question_id,
        title=question.title,
        text=question.text,
        params=params,
        error_code=question.error_code,
        error=question.error,
    )
