"""What a snapshot and its chunks are keyed by: everything that changes the numbers, and nothing else."""

import subprocess
import sys
from dataclasses import fields, replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from storage.fingerprint import Fingerprint, chunk_keys
from tests.storage.made_rows import fingerprint

NAMES = [field.name for field in fields(Fingerprint)]
TEXT_NAMES = [name for name in NAMES if name != "format_version"]
GOLDEN = Fingerprint(
    tenant="acme",
    document_id="1" * 64,
    prefix_ids="2" * 64,
    weights="3" * 64,
    config="4" * 64,
    adapter="",
    tokenizer="5" * 64,
    template="6" * 64,
    kv_dtype="bfloat16",
    codec="raw",
    layout="k.v.[kv_heads,tokens,head_dim]",
    format_version=1,
)
made = st.builds(Fingerprint, **{name: st.text(max_size=8) for name in TEXT_NAMES}, format_version=st.integers(1, 9))
token_ids = st.lists(st.integers(0, 200_000), max_size=40)


def changed(value: str | int) -> str | int:
    return value + 1 if isinstance(value, int) else value + "x"


def test_the_keys_of_a_known_fingerprint_are_those_of_every_version_before() -> None:
    """If this fails, snapshots stored earlier are not found any more: then FORMAT_VERSION has to change too."""
    root = GOLDEN.chain_root()

    assert GOLDEN.digest() == "af39f2b5810d16b7ecce7f415293120d7dd4183cfca77e050d3d8a7f356d928f"
    assert root == "ba95d7efe12cd9b86055cb41c23eb748ccb91039d1f38e7a692b678a09f11d66"
    assert chunk_keys(root, [1, 2, 3, 4, 5], (2, 4, 5)) == [
        "20a44e336da9072bf83c8f6b06a05dad6a8ec014207e6260f34cfca3334e8461",
        "e8a915334943c69449815ceea7f59ec37330e41dbe106d5cbe4c09a4f22afbcb",
        "65e3799463027b867bb80b6dcd17c3f589fac100521575103dc8dfba46ee4078",
    ]


@pytest.mark.parametrize("name", NAMES)
def test_each_field_alone_changes_the_digest(name: str) -> None:
    one = fingerprint()

    assert replace(one, **{name: changed(getattr(one, name))}).digest() != one.digest()


@pytest.mark.parametrize("name", NAMES)
def test_the_chain_starts_from_every_field_but_the_documents_own(name: str) -> None:
    one = fingerprint()

    root = replace(one, **{name: changed(getattr(one, name))}).chain_root()

    assert (root == one.chain_root()) == (name in ("document_id", "prefix_ids"))


@given(made, made)
def test_different_fingerprints_have_different_digests(one: Fingerprint, other: Fingerprint) -> None:
    assert (one.digest() == other.digest()) == (one == other)


@given(made, st.integers(0, len(TEXT_NAMES) - 2), st.integers(1, 8))
def test_what_moves_into_the_neighbouring_field_changes_the_digest(one: Fingerprint, index: int, count: int) -> None:
    left, right = TEXT_NAMES[index : index + 2]
    value = getattr(one, left)
    assume(value)
    moved = replace(one, **{left: value[:-count], right: value[-count:] + getattr(one, right)})

    assert moved.digest() != one.digest()
    if right not in ("document_id", "prefix_ids") and left not in ("document_id", "prefix_ids"):
        assert moved.chain_root() != one.chain_root()


@given(made)
def test_swapped_fields_change_the_digest(one: Fingerprint) -> None:
    assume(one.config != one.tokenizer)

    assert replace(one, config=one.tokenizer, tokenizer=one.config).digest() != one.digest()


def test_quotes_and_braces_cannot_imitate_another_field() -> None:
    forged = fingerprint(weights='w","tokenizer":"t', tokenizer="")

    assert forged.digest() != fingerprint(weights="w", tokenizer="t").digest()


def test_the_digest_is_the_same_in_every_process() -> None:
    script = (
        "from tests.storage.made_rows import fingerprint\n"
        "from storage.fingerprint import chunk_keys\n"
        "one = fingerprint()\n"
        "print(one.digest(), one.chain_root(), *chunk_keys(one.chain_root(), [3, 1, 2], (2, 3)))"
    )
    one = fingerprint()
    expected = [one.digest(), one.chain_root(), *chunk_keys(one.chain_root(), [3, 1, 2], (2, 3))]
    for seed in ("1", "4242"):
        shown = subprocess.run(
            [sys.executable, "-c", script],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        assert shown.stdout.split() == expected


def test_the_fields_are_the_whole_fingerprint() -> None:
    one = fingerprint()

    assert Fingerprint(**one.fields()) == one  # type: ignore[arg-type]
    assert list(one.fields()) == NAMES


def keys_of(ids: list[int], size: int, *, root: str = "root") -> list[str]:
    stops = [min(start + size, len(ids)) for start in range(0, len(ids), size)]
    return chunk_keys(root, ids, stops)


@given(token_ids, token_ids, token_ids, st.integers(1, 9))
def test_equal_beginnings_have_equal_keys_and_only_those(
    beginning: list[int], one: list[int], other: list[int], size: int
) -> None:
    ids, others = beginning + one, beginning + other
    keys, other_keys = keys_of(ids, size), keys_of(others, size)

    for index, (key, other_key) in enumerate(zip(keys, other_keys, strict=False)):
        stop = (index + 1) * size
        assert (key == other_key) == (ids[:stop] == others[:stop])
    assert len(keys) == -(-len(ids) // size)
    assert len(set(keys)) == len(keys)


@given(token_ids, st.integers(1, 9))
def test_another_root_has_other_keys(ids: list[int], size: int) -> None:
    assert not {*keys_of(ids, size)} & {*keys_of(ids, size, root="other")}


@given(token_ids, st.integers(1, 9), st.integers(1, 9))
def test_chunks_of_another_size_have_other_keys(ids: list[int], size: int, other_size: int) -> None:
    """All but those of a prefix that is one chunk either way, which then is the same chunk."""
    assume(size != other_size)

    shared = {*keys_of(ids, size)} & {*keys_of(ids, other_size)}

    assert len(shared) == (1 if 0 < len(ids) <= min(size, other_size) else 0)
