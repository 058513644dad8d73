from email.message import EmailMessage
from pathlib import Path

from tests.pipeline.made_files import docx_file, lines, p, pages_of, pdf_file, read, text_file
from tests.pipeline.test_archive import zipped


def message(body: str = "See attached.", subject: str = "Contract") -> EmailMessage:
    made = EmailMessage()
    made["From"], made["To"], made["Subject"] = "a@example.com", "b@example.com", subject
    made["Received"] = "by a server"
    made.set_content(body)
    return made


def attach(made: EmailMessage, name: str, content: bytes) -> EmailMessage:
    made.add_attachment(content, maintype="application", subtype="octet-stream", filename=name)
    return made


def mail_file(folder: Path, made: EmailMessage, name: str = "mail.eml") -> Path:
    return text_file(folder, made.as_bytes(), name)


def test_a_message_and_its_attachments_are_one_document_with_a_page_map(tmp_path: Path) -> None:
    pdf = pdf_file(tmp_path, lines("fee"), lines("term")).read_bytes()
    word = docx_file(tmp_path, p("annex")).read_bytes()
    made = attach(attach(message(), "k 10.pdf", pdf), "k 2.docx", word)

    document = read(mail_file(tmp_path, made))

    assert pages_of(document) == [
        "From: a@example.com\nTo: b@example.com\nSubject: Contract\n\nSee attached.",
        "[Attachment: k 2.docx]\n\nannex",
        "[Attachment: k 10.pdf]\n\nfee",
        "term",
    ]
    assert document.kind == "mail"
    assert [document.part_of(page) for page in (1, 2, 3, 4)] == ["mail.eml", "k 2.docx", "k 10.pdf", "k 10.pdf"]


def test_the_order_of_attachments_in_the_message_does_not_matter(tmp_path: Path) -> None:
    parts = {"b.txt": b"bee", "a.txt": b"ay", "same.txt": b"1"}
    made = [message(), message()]
    for name, content in parts.items():
        attach(made[0], name, content)
    for name, content in reversed(parts.items()):
        attach(made[1], name, content)

    first, second = (read(mail_file(tmp_path, one, f"{index}.eml")) for index, one in enumerate(made))

    assert first.document_id == second.document_id


def test_an_attachment_that_cannot_be_read_is_named_in_text_and_notes(tmp_path: Path) -> None:
    made = attach(attach(message(), "logo.png", b"\x89PNG\r\n"), "empty.txt", b"")

    document = read(mail_file(tmp_path, made))

    assert "[Attachment: logo.png (not read: unsupported type)]" in document.text
    assert "[Attachment: empty.txt (not read: empty document)]" in document.text
    assert len(document.notes) == 2


def test_messages_and_archives_in_a_message_belong_to_it(tmp_path: Path) -> None:
    made = attach(message(), "more.zip", zipped({"x.txt": b"zipped words"}))
    made.add_attachment(attach(message("inner words", "Forwarded"), "deep.txt", b"deep words"))

    document = read(mail_file(tmp_path, made))

    for words in ("inner words", "deep words", "zipped words", "Subject: Forwarded"):
        assert document.text.count(words) == 1
    assert document.part_of(document.page_of(document.text.index("deep words"))) == "message.eml/deep.txt"


def test_messages_in_messages_end_at_a_depth(tmp_path: Path) -> None:
    made = message("level 0")
    for level in range(1, 9):
        outer = message(f"level {level}")
        outer.add_attachment(made)
        made = outer

    text = read(mail_file(tmp_path, made)).text

    assert "level 8" in text and "level 3" in text
    assert "level 2" not in text
    assert "not read: parse limit exceeded" in text


def test_a_message_in_html_and_an_old_chinese_encoding_is_read(tmp_path: Path) -> None:
    made = message(subject="采购合同")
    made.set_content("<p>甲方应当付款。</p>", subtype="html", charset="gb18030")

    assert read(mail_file(tmp_path, made)).text.endswith("Subject: 采购合同\n\n甲方应当付款。")


def test_the_plain_form_of_a_body_is_read_once(tmp_path: Path) -> None:
    made = message("plain words")
    made.add_alternative("<p>html words</p>", subtype="html")

    text = read(mail_file(tmp_path, made)).text

    assert "plain words" in text
    assert "html words" not in text


def test_a_message_is_known_by_its_headers(tmp_path: Path) -> None:
    assert read(mail_file(tmp_path, message(), "mail")).kind == "mail"
    assert read(mail_file(tmp_path, message(), "mail.txt")).kind == "text"
