from pipeline.documents.document import EXTRACTOR, Document
from pipeline.documents.options import AS_USUAL, Normalise, ParseLimits, ReadOptions, Split, Tracked
from pipeline.documents.reader import read_document, read_documents
from pipeline.documents.sources import Source, find_sources

__all__ = [
    "AS_USUAL",
    "EXTRACTOR",
    "Document",
    "Normalise",
    "ParseLimits",
    "ReadOptions",
    "Source",
    "Split",
    "Tracked",
    "find_sources",
    "read_document",
    "read_documents",
]
