"""What kind of file some bytes are."""

import re
from pathlib import PurePath

from pipeline.errors import DocumentError, EmptyDocument, EncryptedDocument, UnsupportedType

_KIND_BY_SUFFIX = {
    ".pdf": "pdf",
    ".docx": "docx",
    ".txt": "text",
    ".text": "text",
    ".md": "text",
    ".markdown": "text",
    ".html": "html",
    ".htm": "html",
    ".xhtml": "html",
    ".eml": "mail",
    ".mht": "mail",
    ".mhtml": "mail",
    ".zip": "zip",
}
ZIP_MAGIC = (b"PK\x03\x04", b"PK\x05\x06")
_PDF_MAGIC = b"%PDF-"
_OLE_MAGIC = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"
_OTHER_MAGIC = {
    b"{\\rtf": "a Rich Text file (.rtf)",
    b"\x89PNG": "an image",
    b"\xff\xd8\xff": "an image",
    b"GIF8": "an image",
    b"II*\0": "an image",
    b"MM\0*": "an image",
    b"7z\xbc\xaf\x27\x1c": "a 7z archive",
    b"Rar!\x1a\x07": "a RAR archive",
    b"\x1f\x8b": "a gzip archive",
}
_HEAD_BYTES = 4096
# Also where a filing with the SEC wraps it into tags of its own.
_HTML = re.compile(rb"\s*<(?:!doctype\s+html|html|head|body)[\s>]|\s*<[^>]+>.*?<html[\s>]", re.IGNORECASE | re.DOTALL)
_HEADERS = b"Received|Return-Path|From|To|Subject|Date|MIME-Version|Message-ID|Delivered-To|X-[A-Za-z-]+|DKIM-Signature"
_MAIL = re.compile(rb"(?:(?:" + _HEADERS + rb"):[^\r\n]*\r?\n(?:[ \t][^\r\n]*\r?\n)*){3}", re.IGNORECASE)


def kind_of(path: PurePath, data: bytes) -> str:
    """By what the file begins with; its name decides only where that says nothing.

    Raises:
        DocumentError: nothing here can read it.
    """
    if not data:
        raise EmptyDocument(path)
    head = data[:_HEAD_BYTES]
    if head.startswith(_OLE_MAGIC):
        raise _ole_error(path, data)
    for magic, found in _OTHER_MAGIC.items():
        if head.startswith(magic):
            raise UnsupportedType(path, found=found)
    begin = head.lstrip(b"\xef\xbb\xbf\t\n\r ")
    if begin.startswith(ZIP_MAGIC):
        return "zip"
    suffix = path.suffix.lower()
    named = _KIND_BY_SUFFIX.get(suffix)
    if begin.startswith(_PDF_MAGIC) or (named in (None, "pdf") and _PDF_MAGIC in head[:1024]):
        return "pdf"
    if named != "mail" and _HTML.match(begin):
        return "html"
    if named != "text" and _MAIL.match(head):
        return "mail"
    if named is None:
        raise UnsupportedType(path, found=f"a file of type {suffix}" if suffix else "a file without a type")
    return named


def _ole_error(path: PurePath, content: bytes) -> DocumentError:
    """Microsoft's container of before 2007, which also wraps encrypted files of after."""
    suffix = path.suffix.lower()
    if "EncryptedPackage".encode("utf-16-le") in content:
        return EncryptedDocument(path)
    if "WordDocument".encode("utf-16-le") in content or suffix == ".doc":
        return UnsupportedType(path, found="an old Word file (.doc)", save_as=".docx or PDF")
    if suffix == ".msg" or "__nameid_version1.0".encode("utf-16-le") in content:
        return UnsupportedType(path, found="an Outlook message (.msg)", save_as=".eml")
    if suffix == ".docx":
        return EncryptedDocument(path)
    return UnsupportedType(path, found="an old Microsoft Office file")
