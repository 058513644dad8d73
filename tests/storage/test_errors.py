"""Every error of the storage floor says something, survives a trip to another process, and is raised by a test."""

import ast
import inspect
import pickle
from pathlib import Path

import pytest

from storage import errors
from storage.errors import StorageError

KINDS = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, StorageError)]
# Caught as what their members have in common; ObjectStoreError is also raised itself.
FAMILIES = {"StorageError", "SnapshotError", "StoreUnusable"}
ARGUMENTS = {
    "ObjectMissing": (("chunks/a",), {}),
    "BucketMissing": (("contracts",), {}),
    "WrongRegion": (("us-east-1",), {"expected": "eu-west-1"}),
    "SnapshotMissing": (("7",), {}),
    "SnapshotCorrupt": (("chunks/a",), {"expected": "4 bytes", "actual": "3 bytes"}),
    "SnapshotInUse": ((7,), {}),
    "ArchiveRefused": (("night.tar", "it holds no manifest"), {}),
    "JobMissing": (("0123456789ab",), {}),
    "KeyTaken": (("night-7", "0123456789ab"), {}),
    "RetryRefused": (("0123456789ab",), {}),
    "QueueFull": ((9, 2, 10, "acme"), {}),
    "ScheduleMissing": (("nightly",), {}),
    "ScheduleTaken": (("nightly",), {}),
    "DocumentUnknown": (("d" * 64,), {}),
}


def make(kind: type[StorageError]) -> StorageError:
    args, kwargs = ARGUMENTS.get(kind.__name__, ((), {}))
    return kind(*args, **kwargs)


def names_expected_in_tests() -> set[str]:
    """Names of the classes given to `pytest.raises` anywhere in the tests of this floor."""
    found = set()
    for path in Path(__file__).parent.glob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.raises":
                found |= {inner.id for inner in ast.walk(node.args[0]) if isinstance(inner, ast.Name)}
    return found


def test_every_error_is_raised_by_a_test() -> None:
    assert {kind.__name__ for kind in KINDS} - FAMILIES <= names_expected_in_tests()


def test_the_tree_in_the_docstring_names_every_error() -> None:
    for kind in KINDS:
        assert f"{kind.__name__} " in f"{errors.__doc__} ".replace("\n", " \n")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_an_error_is_one_sentence_or_two_without_being_given_any(kind: type[StorageError]) -> None:
    shown = str(make(kind))

    assert shown.endswith(".")
    assert "\n" not in shown


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_an_error_survives_pickling_with_its_message_and_data(kind: type[StorageError]) -> None:
    one = make(kind)

    found = pickle.loads(pickle.dumps(one))

    assert type(found) is kind
    assert (str(found), vars(found)) == (str(one), vars(one))
