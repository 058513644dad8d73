"""The commands that look after snapshots, as a person calls them, with a tiny model."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.system.conftest import Installation

NUM_CHUNKS = 4  # the system prompt is one of its own


@pytest.fixture(scope="module")
def night(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> tuple[Installation, str]:
    """One machine whose only job has answered two questions about one contract; made once, copied by each test."""
    folder = tmp_path_factory.mktemp("night")
    settings = {"MODEL": tiny_model, "DATA_DIR": folder / "data", "SWEEP_GRACE_S": 0, "CHUNK_TOKENS": 256}
    installation = Installation({f"PLATEMAKER_{name}": str(value) for name, value in settings.items()}, folder)
    (folder / "a.txt").write_text("".join(f"Article {n}. The fee is {n} euros.\n" for n in range(12)))
    return installation, str(run(installation)["job_id"])


@pytest.fixture
def job_id(night: tuple[Installation, str]) -> str:
    return night[1]


@pytest.fixture
def laptop(night: tuple[Installation, str], tmp_path: Path) -> Installation:
    folder = tmp_path / "laptop"
    shutil.copytree(night[0].folder, folder)
    return Installation({**night[0].environment, "PLATEMAKER_DATA_DIR": str(folder / "data")}, folder)


def run(laptop: Installation) -> dict[str, Any]:
    found: dict[str, Any] = laptop.json("run", "a.txt", "-q", "What?", "-q", "When?", "--max-tokens", "4", "--json")
    assert found["answered"] == 2
    return found


def ok(laptop: Installation, *arguments: object) -> str:
    done = laptop.command(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def chunks(laptop: Installation) -> list[Path]:
    return sorted((laptop.folder / "data" / "objects" / "chunks").glob("*"))


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def test_a_snapshot_is_listed_and_shown(laptop: Installation, job_id: str) -> None:
    listed = laptop.json("snapshots", "list", "--json")
    shown = laptop.json("snapshots", "show", listed["snapshot_id"], "--json")
    text = ok(laptop, "snapshots", "show", listed["snapshot_id"])

    assert (listed["state"], listed["sources"], listed["pinned"]) == ("ready", ["a.txt"], False)
    assert "a.txt" in ok(laptop, "snapshots", "list")
    assert shown["answers"] == [{"job_id": job_id, "answers": 2}]
    assert [chunk["key"] for chunk in shown["chunks"]]
    assert {f"{chunk['key']}.safetensors" for chunk in shown["chunks"]} == {path.name for path in chunks(laptop)}
    assert (shown["num_layers"], shown["leases"], shown["problem"]) == (4, [], None)
    assert [event["event"] for event in shown["lineage"]] == ["published"]
    for part in (shown["document_id"], job_id, shown["fingerprint"]["weights"], shown["expires_at"], "4 layers"):
        assert part in text


def test_a_damaged_chunk_is_named_and_its_snapshot_made_again(laptop: Installation) -> None:
    assert "whole" in ok(laptop, "snapshots", "verify")
    damage(chunks(laptop)[0])

    done = laptop.command("snapshots", "verify")

    assert done.returncode == 1
    assert chunks(laptop)[0].name in done.stdout
    assert laptop.json("snapshots", "list", "--json")["state"] == "quarantined"
    again = run(laptop)
    assert again["tokens_read"] > 0
    assert ok(laptop, "snapshots", "verify", "1")
    events = [event["event"] for event in laptop.json("snapshots", "show", "1", "--json")["lineage"]]
    assert events == ["published", "quarantined", "recomputed"]


def test_a_damaged_manifest_is_named(laptop: Installation) -> None:
    (manifest,) = (laptop.folder / "data" / "objects" / "manifests").rglob("*.json")
    damage(manifest)

    done = laptop.command("snapshots", "verify", "--json")

    assert done.returncode == 1
    assert manifest.name in json.loads(done.stdout)["problems"][0]


def test_why_names_the_field_that_differs(laptop: Installation) -> None:
    (laptop.folder / "b.txt").write_text("Another contract.")
    never = laptop.json("snapshots", "why", "b.txt", "--json")
    laptop.environment["PLATEMAKER_CODEC"] = "int8"
    lossy = laptop.json("snapshots", "why", "b.txt", "--json")
    del laptop.environment["PLATEMAKER_CODEC"]
    hit = laptop.json("snapshots", "why", "a.txt", "--json")
    laptop.environment["PLATEMAKER_SYSTEM_PROMPT"] = "Be brief."
    missed = laptop.json("snapshots", "why", "a.txt", "--json")
    by_id = ok(laptop, "snapshots", "why", missed["document_id"][:12])

    assert (never["hit"], never["snapshot_id"]) == (False, None)
    assert 0 < never["reused_tokens"] < never["num_tokens"]  # the system prompt
    assert lossy["reused_tokens"] == 0
    assert (hit["hit"], hit["new_tokens"], hit["differences"]) == (True, 0, [])
    assert not missed["hit"]
    assert {difference["field"] for difference in missed["differences"]} >= {"template"}
    assert missed["new_tokens"] == missed["num_tokens"] > 0
    assert missed["prefill_s"] > 0
    assert "Miss" in by_id and "template" in by_id


def test_a_snapshot_is_pinned_removed_and_swept(laptop: Installation) -> None:
    assert "pinned" in ok(laptop, "snapshots", "pin", 1)
    assert laptop.json("snapshots", "list", "--json")["pinned"]
    assert laptop.json("snapshots", "unpin", 1, "--json") == {"snapshot_id": 1, "state": "ready", "pinned": False}
    assert laptop.json("snapshots", "rm", 1, "--json")["state"] == "removed"
    planned = laptop.json("sweep", "--dry-run", "--json")
    assert chunks(laptop)
    swept = laptop.json("sweep", "--json")

    assert chunks(laptop) == []
    assert {**planned, "dry_run": False} == swept
    assert (swept["manifests"], swept["chunks"], swept["orphans"]) == (1, NUM_CHUNKS, 0)
    why = laptop.json("snapshots", "why", "a.txt", "--json")
    assert (why["hit"], why["reason"]) == (False, "the snapshot is removed")
    assert run(laptop)["snapshots_found"] == 0


def test_an_exported_snapshot_is_found_on_another_machine(laptop: Installation) -> None:
    ok(laptop, "snapshots", "export", 1, "a.tar")
    laptop.environment["PLATEMAKER_DATA_DIR"] = str(laptop.folder / "second")
    ok(laptop, "db", "upgrade")

    imported = laptop.json("snapshots", "import", "a.tar", "--json")

    assert imported["state"] == "ready"
    assert run(laptop)["snapshots_found"] == 1
    laptop.environment["PLATEMAKER_TENANT"] = "other"
    refused = laptop.command("snapshots", "import", "a.tar")
    assert (refused.returncode, "tenant default" in refused.stderr) == (2, True)
    assert laptop.command("snapshots", "show", 1).returncode == 2


def test_a_forgotten_document_leaves_its_name_and_a_count(laptop: Installation, job_id: str) -> None:
    texts = laptop.folder / "data" / "objects" / "documents"
    assert [*texts.rglob("*.txt")]

    counts = laptop.json("forget", "a.txt", "--json")

    assert {name: counts[name] for name in ("documents", "sources", "items", "answers", "snapshots", "chunks")} == {
        "documents": 1,
        "sources": 1,
        "items": 2,
        "answers": 2,
        "snapshots": 1,
        "chunks": NUM_CHUNKS,
    }
    assert not [*texts.rglob("*.txt")] and not chunks(laptop)
    assert {(row["answer"], row["error_code"]) for row in laptop.report(job_id)} == {(None, "forgotten")}
    again = laptop.command("forget", "a.txt")
    assert (again.returncode, "no document" in again.stderr) == (2, True)


def test_a_tenant_forgets_only_itself(laptop: Installation) -> None:
    refused = laptop.command("forget", "--tenant", "other")
    neither = laptop.command("forget")
    counts = laptop.json("forget", "--tenant", "default", "--json")

    assert (refused.returncode, neither.returncode) == (2, 2)
    assert "PLATEMAKER_TENANT=other" in refused.stderr
    assert counts["documents"] == 1 and not chunks(laptop)


def test_unused_snapshots_expire(laptop: Installation) -> None:
    laptop.environment["PLATEMAKER_SNAPSHOT_MAX_AGE_S"] = "0.001"

    assert "Would expire 1" in ok(laptop, "sweep", "--dry-run")
    assert laptop.json("snapshots", "list", "--json")["state"] == "ready"
    assert f"Expired 1 snapshots and deleted 1 manifests, {NUM_CHUNKS} chunks" in ok(laptop, "sweep")
    assert laptop.json("snapshots", "list", "--json")["state"] == "expired"


def test_two_documents_of_one_name_are_told_apart_by_id(laptop: Installation) -> None:
    (laptop.folder / "a.txt").write_text("Another contract.")
    run(laptop)

    done = laptop.command("forget", "a.txt")

    assert done.returncode == 2
    assert "2 documents" in done.stderr
