"""A message and its attachments as one document."""

import hashlib
from collections.abc import Callable
from email import message_from_bytes, policy
from email.message import EmailMessage, MIMEPart
from pathlib import PurePath

from pipeline.documents.charset import decode
from pipeline.documents.document import RawPages
from pipeline.documents.joining import join
from pipeline.documents.order import natural
from pipeline.documents.web_page import html_pages
from pipeline.errors import DocumentError, ParseLimitExceeded, UnreadableDocument

MOST_ATTACHMENTS = 1000
_SHOWN_HEADERS = ("From", "To", "Cc", "Date", "Subject")

ReadPart = Callable[[PurePath, bytes], RawPages]


def read_mail(path: PurePath, data: bytes, read_part: ReadPart) -> RawPages:
    """The headers that people see, the body, then the attachments in the natural order of their names.

    That order, and not the message's, since programs that forward a message shuffle them.
    """
    message = message_from_bytes(data, policy=policy.default)
    assert isinstance(message, EmailMessage)
    try:
        body = message.get_body(preferencelist=("plain", "html"))
        body_pages = RawPages([""]) if body is None else _body_pages(body)
        attachments = sorted(
            ((part.get_filename() or _unnamed(part), _content(part)) for part in _attachments(message)),
            key=lambda found: (natural(found[0]), hashlib.sha256(found[1]).digest()),
        )
        headers = [f"{name}: {' '.join(str(message[name]).split())}" for name in _SHOWN_HEADERS if message[name]]
    except (AttributeError, KeyError, LookupError, TypeError, ValueError) as exc:  # what `email` raises for odd headers
        raise UnreadableDocument(path, reason="its parts cannot be told apart") from exc
    if not headers and body is None and not attachments:
        raise UnreadableDocument(path, reason="it is damaged or not an e-mail")
    if len(attachments) > MOST_ATTACHMENTS:
        raise ParseLimitExceeded(path, resource="attachments", limit=MOST_ATTACHMENTS, unit="files")
    head, *rest = body_pages.pages
    main = body_pages._replace(pages=["\n".join(headers) + "\n\n" + head, *rest])
    return join(
        path.name, main, ((name, _read(path, name, data, read_part)) for name, data in attachments), label="Attachment"
    )


def _attachments(message: MIMEPart) -> list[MIMEPart]:
    """Also pictures inside the body, which often are scans that somebody pasted."""
    body = message.get_body(preferencelist=("plain", "html"))
    alternatives = {id(part) for part in message.walk() if part.get_content_type() in ("text/plain", "text/html")}
    found: list[MIMEPart] = []
    pending: list[MIMEPart] = [message]
    while pending:
        part = pending.pop(0)
        if part is body:
            continue
        if part.get_content_maintype() == "multipart":
            pending = [*part.iter_parts(), *pending]
        elif part.is_attachment() or part.get_filename() or id(part) not in alternatives:
            found.append(part)
    return found


def _read(path: PurePath, name: str, data: bytes, read_part: ReadPart) -> RawPages | DocumentError:
    try:
        return read_part(path / name.replace("/", "_"), data)
    except DocumentError as exc:
        return exc


def _unnamed(part: MIMEPart) -> str:
    return "message.eml" if part.get_content_type() == "message/rfc822" else f"unnamed.{part.get_content_subtype()}"


def _content(part: MIMEPart) -> bytes:
    if part.get_content_type() == "message/rfc822":
        return b"".join(inner.as_bytes() for inner in part.iter_parts())
    payload = part.get_payload(decode=True)
    return payload if isinstance(payload, bytes) else b""


def _body_pages(body: MIMEPart) -> RawPages:
    data = _content(body)
    declared = body.get_content_charset()
    try:
        text = data.decode(declared) if declared and declared != "us-ascii" else decode(data)
    except (LookupError, UnicodeDecodeError):
        text = decode(data)
    return html_pages(text) if body.get_content_subtype() == "html" else RawPages(text.split("\f"))
