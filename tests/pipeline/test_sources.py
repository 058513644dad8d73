from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import boto3
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr

from pipeline.documents import Document, ParseLimits, find_sources, read_documents
from pipeline.documents.order import natural
from pipeline.errors import EmptyFolder, MissingFile
from pipeline.local_servers import SeaweedFS
from storage.errors import BucketMissing
from storage.objects import Bucket, open_bucket
from storage.settings import StorageSettings
from tests.pipeline.made_files import LIMITS, text_file
from tests.pipeline.test_archive import no_bucket, zipped


def names(*named: str | Path) -> list[str]:
    return [source.name for source in find_sources(named, limits=LIMITS, open_bucket=no_bucket)]  # type: ignore[arg-type]


def folder_of(tmp_path: Path) -> Path:
    folder = tmp_path / "deals"
    (folder / "sub").mkdir(parents=True)
    (folder / ".git").mkdir()
    for name in ("k 10.txt", "k 2.txt", "sub/a.txt", ".DS_Store", ".git/x.txt", "~$k 2.docx"):
        text_file(folder, "text", name)
    return folder


def test_a_folder_is_its_files_in_natural_order_without_hidden_ones(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)

    assert names(folder) == [f"{folder}/k 2.txt", f"{folder}/k 10.txt", f"{folder}/sub/a.txt"]


def test_patterns_are_matched_where_the_shell_has_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder_of(tmp_path)
    monkeypatch.chdir(tmp_path)

    assert names("deals/*.txt") == ["deals/k 2.txt", "deals/k 10.txt"]
    assert names("deals/**/*.txt") == ["deals/k 2.txt", "deals/k 10.txt", "deals/sub/a.txt"]
    assert names("deal?") == names("deals")


def test_a_file_whose_name_looks_like_a_pattern_is_that_file(tmp_path: Path) -> None:
    path = text_file(tmp_path, "text", "draft [2].txt")

    assert names(path) == [str(path)]


def test_what_is_not_there_keeps_its_place_with_its_error(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    file = text_file(tmp_path, "text")
    named = [tmp_path / "absent", tmp_path / "no*", file, tmp_path / "empty", "contract\0.txt"]

    sources = find_sources(named, limits=LIMITS, open_bucket=no_bucket)  # type: ignore[arg-type]

    outcomes = [outcome for _, outcome in read_documents(sources, limits=LIMITS, workers=2)]
    assert [type(outcome) for outcome in outcomes] == [MissingFile, MissingFile, Document, EmptyFolder, MissingFile]
    assert [source.name for source in sources] == [str(name) for name in named]


@given(st.lists(st.text(max_size=6), max_size=6))
def test_natural_order_is_one_order_whatever_the_names(found: list[str]) -> None:
    forwards, backwards = sorted(found, key=natural), sorted(found, key=natural, reverse=True)

    assert forwards == backwards[::-1]
    assert natural("Annex 2") < natural("annex 10") < natural("Annex 10a")


@pytest.fixture(scope="module")
def bucket_settings(s3_server: SeaweedFS) -> StorageSettings:
    return StorageSettings(
        s3_endpoint_url=s3_server.endpoint_url,
        s3_access_key_id=SecretStr(s3_server.access_key_id),
        s3_secret_access_key=SecretStr(s3_server.secret_access_key),
    )


@pytest.fixture(scope="module")
def filled(s3_server: SeaweedFS) -> Iterator[str]:
    """The server's bucket, with the objects of other people in it."""
    client = boto3.client(
        "s3",
        endpoint_url=s3_server.endpoint_url,
        region_name="us-east-1",
        aws_access_key_id=s3_server.access_key_id,
        aws_secret_access_key=s3_server.secret_access_key,
    )
    name = s3_server.url.removeprefix("s3://").split("/")[0]
    objects = {
        "deals/合同 (1).txt": "甲方应付款。".encode("gbk"),
        "deals/k 2.txt": b"two",
        "deals/all.zip": zipped({"x.txt": b"zip x", "y.txt": b"zip y"}),
        "deals-old/k.txt": b"old",
        "deals/.hidden": b"x",
    }
    for key, content in objects.items():
        client.put_object(Bucket=name, Key=key, Body=content)
    client.close()
    yield name


def test_the_objects_of_a_bucket_are_read_by_prefix(bucket_settings: StorageSettings, filled: str) -> None:
    opened: list[Bucket] = []

    def opener(name: str) -> Bucket:
        opened.append(open_bucket(bucket_settings, name))
        return opened[-1]

    sources = find_sources([f"s3://{filled}/deals", f"s3://{filled}/none"], limits=LIMITS, open_bucket=opener)

    texts = [
        outcome.text if isinstance(outcome, Document) else type(outcome)
        for _, outcome in read_documents(sources, limits=LIMITS, workers=2)
    ]
    for bucket in opened:
        bucket.close()
    assert dict(zip([source.name.removeprefix(f"s3://{filled}/") for source in sources], texts, strict=True)) == {
        "deals/all.zip/x.txt": "zip x",
        "deals/all.zip/y.txt": "zip y",
        "deals/k 2.txt": "two",
        "deals/合同 (1).txt": "甲方应付款。",
        "none": EmptyFolder,
    }
    assert str(sources[-1].error) == f"s3://{filled}/none holds no files; check the name and the folder."


def test_an_object_that_was_deleted_meanwhile_is_one_documents_error(
    bucket_settings: StorageSettings, filled: str
) -> None:
    bucket = open_bucket(bucket_settings, filled)
    sources = find_sources([f"s3://{filled}/deals/k 2.txt"], limits=LIMITS, open_bucket=lambda _: bucket)
    gone = [replace(sources[0], place=replace(sources[0].place, key="deals/gone.txt"))]  # type: ignore[type-var]

    ((_, outcome),) = read_documents(gone, limits=LIMITS, workers=1)

    bucket.close()
    assert isinstance(outcome, MissingFile)


def test_an_object_over_the_size_limit_is_not_fetched(bucket_settings: StorageSettings, filled: str) -> None:
    limits = ParseLimits(max_file_bytes=2)
    bucket = open_bucket(bucket_settings, filled)
    sources = find_sources([f"s3://{filled}/deals/k 2.txt"], limits=limits, open_bucket=lambda _: bucket)
    bucket.get = no_bucket  # type: ignore[method-assign, assignment]

    ((_, outcome),) = read_documents(sources, limits=limits, workers=1)

    bucket.close()
    assert "file size" in str(outcome)


def test_a_bucket_that_is_not_there_ends_the_command(bucket_settings: StorageSettings) -> None:
    bucket = open_bucket(bucket_settings, "no-such-bucket")

    with pytest.raises(BucketMissing):
        find_sources(["s3://no-such-bucket/x"], limits=LIMITS, open_bucket=lambda _: bucket)

    bucket.close()
