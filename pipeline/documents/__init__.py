from pipeline.documents.document import EXTRACTOR, Document
from pipeline.documents.reader import ParseLimits, read_document, read_documents

__all__ = ["EXTRACTOR", "Document", "ParseLimits", "read_document", "read_documents"]
