"""The manifest's bytes: what is written today is read tomorrow, and nothing else passes for it."""

import hashlib
import json
from typing import Any

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from storage.errors import SnapshotCorrupt
from storage.manifest import (
    ChunkEntry,
    Manifest,
    Part,
    Producer,
    chunk_object_key,
    describe_chunk,
    manifest_object_key,
    verify_chunk,
)
from tests.storage.made_rows import entry, manifest

KEY = "manifests/acme/d/f.json"
finite = st.floats(allow_nan=False, allow_infinity=False)
counts = st.integers(0, 2**62)


def test_a_manifest_comes_back_as_it_was_encoded() -> None:
    one = manifest()

    assert Manifest.decode(one.encode(), KEY) == one


@given(
    st.dictionaries(st.text(max_size=9), st.text(max_size=9) | counts, max_size=5),
    st.lists(finite, max_size=5),
    st.lists(counts, max_size=5),
    st.text(max_size=9),
)
def test_every_manifest_comes_back(
    fields: dict[str, str | int], logits: list[float], token_ids: list[int], text: str
) -> None:
    one = manifest(
        fingerprint=fields,
        probe_logits=tuple(logits),
        probe_token_ids=tuple(token_ids),
        codec=text,
        producer=Producer(version=text, device=text, torch=text),
    )

    found = Manifest.decode(one.encode(), KEY)

    assert found == one
    assert {name: type(value) for name, value in found.fingerprint.items()} == {
        name: type(value) for name, value in fields.items()
    }


def test_the_bytes_of_a_known_manifest_are_those_of_every_version_before() -> None:
    """If this fails, manifests stored earlier may not be readable any more: then FORMAT_VERSION has to change too."""
    data = manifest().encode()

    assert hashlib.sha256(data).hexdigest() == "efdf0523c429f509f3ec2542d3a85e85fb6f35281c6cb6635b22d86a0ed2dea5"


def test_a_manifest_reads_without_this_program() -> None:
    found = json.loads(manifest().encode())

    assert list(found) == [
        "fingerprint",
        "num_tokens",
        "num_layers",
        "chunks",
        "codec",
        "probe_token_ids",
        "probe_logits",
        "producer",
    ]
    assert found["chunks"][1] == {
        "key": f"{1:064x}",
        "start": 4,
        "stop": 8,
        "size_bytes": 101,
        "xxh3": f"{1:032x}",
        "sha256": f"{2:064x}",
        "parts": [[101, f"{1:032x}"]],
    }


@pytest.mark.parametrize(
    "data",
    [b"", b"{}", b"null", b"[]", b"\x00\xff\xfe", b"<Error><Code>NoSuchKey</Code></Error>", b"{" * 10_000],
    ids=["empty", "empty object", "null", "list", "no text", "an error page", "nested"],
)
def test_what_is_not_a_manifest_is_refused(data: bytes) -> None:
    with pytest.raises(SnapshotCorrupt) as caught:
        Manifest.decode(data, KEY)

    assert (caught.value.key, caught.value.expected) == (KEY, "a manifest")


def test_a_manifest_cut_off_anywhere_is_refused() -> None:
    data = manifest().encode()
    for stop in range(0, len(data) - 1, 7):
        with pytest.raises(SnapshotCorrupt):
            Manifest.decode(data[:stop], KEY)


def change(path: list[str | int], value: Any) -> bytes:
    whole = json.loads(manifest().encode())
    inner = whole
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value
    return json.dumps(whole).encode()


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["compression"], "zstd"),
        (["chunks", 0, "offset"], 0),
        (["producer", "host"], "a"),
        (["num_tokens"], "many"),
        (["num_tokens"], 7.5),
        (["num_tokens"], None),
        (["chunks"], {}),
        (["chunks", 1], None),
        (["fingerprint"], []),
        (["fingerprint", "weights"], None),
        (["probe_logits"], ["nan?"]),
    ],
)
def test_another_field_or_another_kind_of_value_is_refused(path: list[str | int], value: Any) -> None:
    with pytest.raises(SnapshotCorrupt, match="a manifest"):
        Manifest.decode(change(path, value), KEY)


@pytest.mark.parametrize("name", [name for name, field in Manifest.model_fields.items() if field.is_required()])
def test_a_missing_field_is_refused(name: str) -> None:
    whole = json.loads(manifest().encode())
    del whole[name]

    with pytest.raises(SnapshotCorrupt, match="a manifest"):
        Manifest.decode(json.dumps(whole).encode(), KEY)


@given(st.binary(max_size=300))
def test_a_chunk_is_what_its_entry_says(data: bytes) -> None:
    found = describe_chunk("ab" * 32, 4, 8, data, [len(data) // 3, len(data)])

    verify_chunk(found, data)

    assert found.sha256 == hashlib.sha256(data).hexdigest()
    assert (found.key, found.start, found.stop, found.size_bytes) == ("ab" * 32, 4, 8, len(data))
    assert found.object_key == f"chunks/{'ab' * 32}.safetensors"


@given(st.binary(min_size=1, max_size=300), st.data())
def test_a_chunk_with_any_bit_flipped_or_any_byte_gone_is_refused(data: bytes, draw: st.DataObject) -> None:
    found = describe_chunk("ab" * 32, 4, 8, data, [len(data) // 3, len(data)])
    at, bit = draw.draw(st.integers(0, len(data) - 1)), draw.draw(st.integers(0, 7))
    flipped = data[:at] + bytes([data[at] ^ (1 << bit)]) + data[at + 1 :]

    for wrong in (flipped, data[:at], data[:at] + data[at + 1 :], data + b"\0"):
        with pytest.raises(SnapshotCorrupt) as caught:
            verify_chunk(found, wrong)
        assert caught.value.key == found.object_key
        assert caught.value.expected != caught.value.actual


def test_the_hashes_of_a_known_chunk_are_those_of_every_version_before() -> None:
    assert describe_chunk("k", 0, 1, b"platemaker", [5, 10]) == ChunkEntry(
        key="k",
        start=0,
        stop=1,
        size_bytes=10,
        xxh3="62a5bb59c2bb8694b9dd63f22401f7c1",
        sha256=hashlib.sha256(b"platemaker").hexdigest(),
        parts=(Part(5, xxhash.xxh3_128_hexdigest(b"plate")), Part(10, xxhash.xxh3_128_hexdigest(b"maker"))),
    )


def test_objects_lie_where_they_always_did() -> None:
    assert manifest_object_key("acme", "doc", "print") == "manifests/acme/doc/print.json"
    assert chunk_object_key("chain") == "chunks/chain.safetensors"
    assert entry(3).object_key == f"chunks/{3:064x}.safetensors"
