import io
from collections.abc import Callable
from pathlib import Path, PurePath
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

import pytest

from pipeline.documents import Document, ParseLimits, archive, find_sources, read_documents
from pipeline.errors import (
    DocumentError,
    EmptyFolder,
    EncryptedDocument,
    ParseLimitExceeded,
    UnreadableDocument,
)
from tests.pipeline.made_files import docx_file, p, text_file

LIMITS = ParseLimits(max_file_bytes=2**20)


def no_bucket(name: str) -> None:
    raise AssertionError(name)


def read_all(*named: str | Path) -> dict[str, Document | DocumentError]:
    sources = find_sources(named, limits=LIMITS, open_bucket=no_bucket)  # type: ignore[arg-type]
    outcomes = read_documents(sources, limits=LIMITS, workers=2)
    return {sources[index].name: outcome for index, outcome in outcomes}


def zipped(members: dict[str, bytes]) -> bytes:
    file = io.BytesIO()
    with ZipFile(file, "w", ZIP_DEFLATED) as made:
        for name, content in members.items():
            made.writestr(name, content)
    return file.getvalue()


def test_an_archive_is_its_files_and_those_of_the_archives_in_it_in_natural_order(tmp_path: Path) -> None:
    word = docx_file(tmp_path, p("word")).read_bytes()
    inner = zipped({"Annex 10.txt": b"ten", "Annex 2.txt": b"two"})
    path = text_file(
        tmp_path, zipped({"b.zip": inner, "a.docx": word, ".hidden": b"x", "__MACOSX/y.txt": b"y"}), "c.zip"
    )

    found = read_all(path)

    assert {name: outcome.text for name, outcome in found.items() if isinstance(outcome, Document)} == {
        f"{path}/a.docx": "word",
        f"{path}/b.zip/Annex 2.txt": "two",
        f"{path}/b.zip/Annex 10.txt": "ten",
    }
    assert list(found) == sorted(found, key=lambda name: ("Annex 10" in name, name))


def test_names_in_an_archive_are_labels_and_nothing_is_written_to_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = text_file(tmp_path, zipped({"../../evil.txt": b"up", "/etc/evil.txt": b"root"}), "c.zip")
    monkeypatch.setenv("TMPDIR", str(tmp_path))

    assert list(read_all(path)) == [f"{path}/etc/evil.txt", f"{path}/evil.txt"]
    assert [found.name for found in tmp_path.rglob("*")] == ["c.zip"]


def test_names_in_gbk_are_read(tmp_path: Path) -> None:
    data = zipped({"????.txt": b"text"})
    path = text_file(tmp_path, data.replace(b"????", "合同".encode("gbk")), "c.zip")

    assert list(read_all(path)) == [f"{path}/合同.txt"]


def test_one_bad_file_in_an_archive_stops_no_other(tmp_path: Path) -> None:
    members = {"good.txt": b"good", "bomb.txt": bytes(2**20 + 1), "blanks.txt": b" \n"}
    big = zipped(members | {"large.txt": bytes(range(256)) * 5000, "broken.zip": b"PK\x03\x04 no archive"})
    found = read_all(text_file(tmp_path, big, "c.zip"))

    by_name = {Path(name).name: outcome for name, outcome in found.items()}
    assert isinstance(by_name["good.txt"], Document)
    assert isinstance(by_name["bomb.txt"], ParseLimitExceeded)
    assert isinstance(by_name["large.txt"], ParseLimitExceeded)
    assert isinstance(by_name["broken.zip"], UnreadableDocument)
    assert all(str(outcome).endswith(".") for outcome in by_name.values() if isinstance(outcome, DocumentError))


def test_an_encrypted_file_in_an_archive_says_so(tmp_path: Path) -> None:
    data = bytearray(zipped({"secret.txt": b"text"}))
    data[data.index(b"PK\x01\x02") + 8] |= 1  # the flag in the directory
    path = text_file(tmp_path, bytes(data), "c.zip")

    (outcome,) = read_all(path).values()

    assert isinstance(outcome, EncryptedDocument)


def nested(depth: int) -> bytes:
    data = zipped({"deep.txt": b"text"})
    for _ in range(depth - 1):
        data = zipped({"next.zip": data})
    return data


def test_archives_in_archives_end_at_a_depth(tmp_path: Path) -> None:
    found = [
        next(iter(read_all(text_file(tmp_path, nested(depth), "c.zip")).values()))
        for depth in (archive.DEEPEST, archive.DEEPEST + 1)
    ]

    assert isinstance(found[0], Document)
    assert isinstance(found[1], ParseLimitExceeded)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: zipped({}), EmptyFolder),
        (lambda: zipped({"folder/": b""}), EmptyFolder),
        (lambda: zipped({"a.txt": b"text"})[:40], UnreadableDocument),
        (lambda: zipped({f"{index}.txt": b"" for index in range(archive.MOST_MEMBERS + 1)}), ParseLimitExceeded),
    ],
)
def test_a_whole_archive_that_cannot_be_read_is_one_error(
    make: Callable[[], bytes], expected: type[DocumentError], tmp_path: Path
) -> None:
    (outcome,) = read_all(text_file(tmp_path, make(), "c.zip")).values()

    assert isinstance(outcome, expected)


def test_many_archives_share_one_budget_of_unpacked_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "MOST_UNPACKED_BYTES", 100_000)
    inner = zipped({"a.txt": b"0123456789" * 4000})

    with pytest.raises(ParseLimitExceeded, match="unpacked size"):
        archive.list_members(
            PurePath("c.zip"), zipped({f"{index}.zip": inner for index in range(3)}), max_file_bytes=2**20
        )


def test_a_word_file_by_the_name_of_an_archive_is_read(tmp_path: Path) -> None:
    path = docx_file(tmp_path, p("text")).rename(tmp_path / "contract.zip")

    (outcome,) = read_all(path).values()

    assert isinstance(outcome, Document)
    assert outcome.kind == "docx"


def test_a_name_without_anything_is_named_all_the_same() -> None:
    file = io.BytesIO()
    with ZipFile(file, "w") as made:
        made.writestr(ZipInfo("../"), b"")
        made.writestr(ZipInfo(".."), b"text")

    members = archive.list_members(PurePath("c.zip"), file.getvalue(), max_file_bytes=100)

    assert [member.name for member in members] == ["unnamed"]
