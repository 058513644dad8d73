"""Lengths of the documents in a folder, in tokens of the model."""

from pathlib import Path

from kernels.settings import KernelSettings
from pipeline.counting import token_counter
from pipeline.documents import Document, read_documents
from pipeline.errors import PlanError
from pipeline.settings import PipelineSettings


def folder_lengths(folder: Path) -> list[float]:
    """Of each different text; files that cannot be read are left out.

    Raises:
        PlanError: there is no document.
    """
    settings = PipelineSettings()
    counter = token_counter(KernelSettings())
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    found: dict[str, float] = {}
    for _, outcome in read_documents(files, limits=settings.parse_limits, workers=settings.parse_workers):
        if isinstance(outcome, Document):
            found[outcome.document_id] = counter.count(outcome.text)
    if not found:
        raise PlanError(f"{folder} holds no document that can be read")
    return list(found.values())
