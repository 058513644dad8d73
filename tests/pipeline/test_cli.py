import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from pipeline.cli import cli
from pipeline.exits import Exit
from pipeline.local_servers import Valkey

REPOSITORY = Path(__file__).resolve().parents[2]
PLATEMAKER = Path(sys.executable).with_name("platemaker")
COMMANDS = [*typer.main.get_group(cli).commands]
SECRET = "hunter2-swordfish"

Ran = subprocess.CompletedProcess[str]
Run = Callable[..., Ran]


def run_in(folder: Path, *arguments: str, **settings: str) -> Ran:
    command = [str(PLATEMAKER), *arguments]
    environment = environment_of(folder, **settings)
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False)


def environment_of(folder: Path, **settings: str) -> dict[str, str]:
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("PLATEMAKER_", "FORCE_COLOR"))}
    named = {f"PLATEMAKER_{name.upper()}": value for name, value in settings.items()}
    return {**ours, "PLATEMAKER_DATA_DIR": str(folder / "data"), **named}


@pytest.fixture
def platemaker(tmp_path: Path) -> Run:
    """Runs the command in a folder with one contract and nothing else."""
    (tmp_path / "contract.txt").write_text("The fee is due within 30 days.")
    return lambda *arguments, **settings: run_in(tmp_path, *arguments, **settings)


@pytest.fixture(scope="module")
def upgraded(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs the command where the database has its tables, and no job."""
    folder = tmp_path_factory.mktemp("upgraded")
    (folder / "contract.txt").write_text("The fee is due within 30 days.")
    assert run_in(folder, "db", "upgrade").returncode == Exit.OK
    return lambda *arguments, **settings: run_in(folder, *arguments, **settings)


def assert_one_sentence(ran: Ran) -> None:
    assert ran.stdout == ""
    assert ran.stderr.count("\n") == 1 and ran.stderr.endswith(".\n")
    assert "Traceback" not in ran.stderr


def test_help_names_every_command(platemaker: Run) -> None:
    ran = platemaker("--help")

    assert ran.returncode == Exit.OK
    assert [line.split()[0] for line in ran.stdout.split("Commands:")[1].strip().splitlines()] == COMMANDS


@pytest.mark.parametrize("command", [*COMMANDS, "db upgrade"])
def test_every_command_has_help(command: str) -> None:
    ran = CliRunner().invoke(cli, [*command.split(), "--help"], prog_name="platemaker")

    assert ran.exit_code == Exit.OK
    assert ran.stdout.strip().startswith(f"Usage: platemaker {command}")


def test_the_command_line_loads_no_heavy_library() -> None:
    script = "import sys, pipeline.cli; print(*{name.split('.')[0] for name in sys.modules})"
    listing = subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, check=True)

    heavy = {"torch", "transformers", "celery", "kombu", "sqlalchemy", "alembic", "boto3", "pypdfium2"}
    assert not heavy & set(listing.stdout.split())


@pytest.mark.parametrize("command", [["jobs"], ["status", "NOJOB"], ["answers", "NOJOB"], ["submit", "contract.txt"]])
def test_looking_at_jobs_loads_no_model_library(command: list[str], tmp_path: Path) -> None:
    script = (
        "import atexit, sys; atexit.register(lambda: print('torch' in sys.modules))\n"
        f"sys.argv[1:] = {command}\nfrom pipeline.cli import main; main()"
    )
    assert run_in(tmp_path, "db", "upgrade").returncode == Exit.OK
    environment = {**environment_of(tmp_path), "PYTHONPATH": str(REPOSITORY)}
    python = [sys.executable, "-c", script]

    ran = subprocess.run(python, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)

    assert ran.returncode in (Exit.OK, Exit.USAGE)
    assert ran.stdout.split()[-1] == "False"


def test_the_version_is_that_of_the_package(platemaker: Run) -> None:
    assert platemaker("version").stdout.strip() == importlib.metadata.version("platemaker")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nosuch"], "No such command 'nosuch'"),
        (["status"], "Missing argument 'job_id'"),
        (["run", "--questions", "q.txt"], "Missing argument 'files'"),
        (["run", "contract.txt"], "no question: give --questions FILE or -q 'a question'"),
        (["submit", "contract.txt", "-q", "When?"], "set PLATEMAKER_BROKER_URL, or use `platemaker run`"),
        (["worker", "all"], "a worker needs a broker: set PLATEMAKER_BROKER_URL"),
        (["worker", "some"], "is not one of"),
        (
            ["submit", "contract.txt", "-q", "When?", "--max-tokens", "0"],
            "Input should be greater than or equal to 1",
        ),
    ],
)
def test_a_wrong_command_says_what_is_wrong(arguments: list[str], message: str, platemaker: Run) -> None:
    ran = platemaker(*arguments)

    assert ran.returncode == Exit.USAGE
    assert message.lower() in " ".join(ran.stderr.split()).lower()
    assert "Traceback" not in ran.stderr


def test_a_broken_question_file_names_its_line(tmp_path: Path, platemaker: Run) -> None:
    (tmp_path / "checklist.yaml").write_text("- Who signs?\n- 'When?\n")

    ran = platemaker("submit", "contract.txt", "--questions", "checklist.yaml")

    assert ran.returncode == Exit.USAGE
    assert ran.stderr.startswith("checklist.yaml, line 3: not valid YAML")
    assert_one_sentence(ran)


def test_a_database_without_tables_says_what_to_run(platemaker: Run) -> None:
    ran = platemaker("status", "NOJOB")

    assert ran.returncode == Exit.UNAVAILABLE
    assert "Run `platemaker db upgrade`" in ran.stderr
    assert ran.stdout == "" and "Traceback" not in ran.stderr


def test_upgrading_twice_is_upgrading_once(platemaker: Run) -> None:
    first, second = platemaker("db", "upgrade"), platemaker("db", "upgrade")

    assert (first.returncode, second.returncode) == (Exit.OK, Exit.OK)
    assert first.stdout == second.stdout and first.stdout.endswith("schema is current\n")


@pytest.mark.parametrize("command", ["status", "watch", "answers", "cancel", "retry"])
def test_an_unknown_job_is_one_sentence(command: str, upgraded: Run) -> None:
    ran = upgraded(command, "NOJOB")

    assert ran.returncode == Exit.USAGE
    assert ran.stderr == "There is no job NOJOB. `platemaker jobs` lists yours.\n"
    assert ran.stdout == ""


def test_the_cause_is_shown_when_asked_for(upgraded: Run) -> None:
    ran = upgraded("-v", "status", "NOJOB")

    assert ran.returncode == Exit.USAGE
    assert "Traceback (most recent call last)" in ran.stderr
    assert "storage.errors.JobMissing" in ran.stderr
    assert ran.stderr.endswith("There is no job NOJOB. `platemaker jobs` lists yours.\n")


WRONG_SETTINGS = {
    "lease_s": "abc",
    "max_attempts": "0",
    "tenant": "No Blanks",
    "parse_time_s": "-1",
    "s3_max_connections": "many",
    "store_url": "ftp://host/folder",
    "s3_endpoint_url": f"http://me:{SECRET}@host",
    "database_url": f"mysql://me:{SECRET}@host/name",
}


@pytest.mark.parametrize("name", WRONG_SETTINGS)
def test_a_wrong_setting_is_named_without_its_value(name: str, upgraded: Run) -> None:
    settings = {"broker_url": "redis://host", name: WRONG_SETTINGS[name]}

    ran = upgraded("submit", "contract.txt", "-q", "When?", **settings)

    assert ran.returncode == Exit.USAGE
    assert f"PLATEMAKER_{name.upper()}: " in ran.stderr
    assert_one_sentence(ran)
    assert WRONG_SETTINGS[name] not in ran.stderr


SECRETS = {
    "broker_url": f"redis://:{SECRET}@127.0.0.1:1/0",
    "database_url": f"postgresql://me:{SECRET}@127.0.0.1:1/name",
    "s3_access_key_id": SECRET,
    "s3_secret_access_key": SECRET,
    "flower_auth": f"me:{SECRET}",
}


def test_a_misspelt_name_in_the_settings_file_is_told(tmp_path: Path, platemaker: Run) -> None:
    (tmp_path / "platemaker.toml").write_text('lease_s = 20\ntenat = "acme"\n')

    done = platemaker("jobs")

    assert done.returncode == Exit.USAGE
    assert "platemaker.toml names what is not a setting: tenat." in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("verbose", [[], ["-v"]])
@pytest.mark.parametrize("wrong", [{}, {"lease_s": "abc"}, {"s3_access_key_id": ""}])
def test_secrets_are_shown_in_no_error(verbose: list[str], wrong: dict[str, str], platemaker: Run) -> None:
    ran = platemaker(*verbose, "submit", "contract.txt", "-q", "When?", **{**SECRETS, **wrong})

    assert ran.returncode in (Exit.USAGE, Exit.UNAVAILABLE)
    assert ran.stderr
    assert SECRET not in ran.stderr + ran.stdout


def test_a_submitted_job_is_seen_and_ended_without_workers(valkey_server: Valkey, upgraded: Run) -> None:
    submitted = upgraded("submit", "contract.txt", "absent.txt", "-q", "When is it due?", broker_url=valkey_server.url)
    job_id = submitted.stdout.strip()
    status = upgraded("status", job_id, "--json")
    listed = upgraded("jobs")
    cancelled = upgraded("cancel", job_id)
    watched = upgraded("watch", job_id)
    answers = upgraded("answers", job_id, "--format", "jsonl")

    assert submitted.returncode == Exit.OK
    assert f"1 of 2 files cannot be read; `platemaker answers {job_id}` says why." in " ".join(submitted.stderr.split())
    assert json.loads(status.stdout)["items"] == {"queued": 1}
    assert listed.stdout.startswith(f"{job_id} waiting: 0 of 1 done")
    assert cancelled.returncode == Exit.OK and f"{job_id} cancelled" in cancelled.stdout
    assert watched.returncode == Exit.CANCELLED
    states = [json.loads(line)["status"] for line in answers.stdout.splitlines()]
    assert states == ["error", "error"]


def test_one_key_is_one_job_and_other_content_under_it_is_refused(valkey_server: Valkey, upgraded: Run) -> None:
    ask = ("submit", "contract.txt", "--key", "monday", "--not-before", "1h", "-q")
    first = upgraded(*ask, "When?", broker_url=valkey_server.url)
    again = upgraded(*ask, "When?", broker_url=valkey_server.url)
    other = upgraded(*ask, "Who?", broker_url=valkey_server.url)

    assert first.stdout == again.stdout != ""
    assert json.loads(upgraded("status", first.stdout.strip(), "--json").stdout)["items"] == {"held": 1}
    assert other.returncode == Exit.USAGE
    assert_one_sentence(other)


def test_a_job_says_its_tier(valkey_server: Valkey, platemaker: Run) -> None:
    assert platemaker("db", "upgrade").returncode == Exit.OK
    ask = ("submit", "contract.txt", "-q", "When?")
    fast = platemaker(*ask, "--tier", "fast", broker_url=valkey_server.url).stdout.strip()
    batch = platemaker(*ask, broker_url=valkey_server.url).stdout.strip()

    tiers = [json.loads(platemaker("status", job_id, "--json").stdout)["tier"] for job_id in (fast, batch)]
    assert tiers == ["fast", "batch"]
    assert [line.split(":")[0] for line in platemaker("jobs").stdout.splitlines()] == [
        f"{batch} waiting",
        f"{fast} waiting, fast",
    ]


def test_a_job_beyond_the_bound_is_refused_with_its_own_exit_code(valkey_server: Valkey, platemaker: Run) -> None:
    assert platemaker("db", "upgrade").returncode == Exit.OK
    settings = {"broker_url": valkey_server.url, "tenant_limits": '{"*": {"queued_items": 1}}'}
    ask = ("submit", "contract.txt", "-q", "When?", "-q", "Who?")

    refused = platemaker(*ask, **settings)

    assert refused.returncode == Exit.QUEUE_FULL
    assert refused.stdout == "" and "Traceback" not in refused.stderr
    assert "0 items of tenant default are not answered yet, and 2 more would go beyond the bound of 1" in refused.stderr
    assert platemaker("jobs").stdout == ""
    assert platemaker(*ask[:4], **settings).returncode == Exit.OK
    assert platemaker(*ask[:4], **settings).returncode == Exit.QUEUE_FULL


@pytest.mark.parametrize("limits", ["three", '{"*": {"runing": 3}}', '{"acme": {"weight": 0}}'])
def test_limits_that_are_wrong_stop_the_start(limits: str, upgraded: Run) -> None:
    ran = upgraded("jobs", tenant_limits=limits)

    assert ran.returncode == Exit.USAGE
    assert_one_sentence(ran)
    assert "PLATEMAKER_TENANT_LIMITS" in ran.stderr


def test_a_schedule_that_is_wrong_or_not_there_is_told(upgraded: Run) -> None:
    times = ("--at", "0 1 * * *", "--time-zone", "Asia/Shanghai")
    wrong = upgraded("nightly", "add", "n", "--from", ".", "--questions", "q.txt", "--at", "0 1 * * *")
    missing = upgraded("nightly", "add", "n", "--from", ".", "--questions", "q.txt", *times)
    asked = upgraded("nightly", "add", "n", "--from", ".", "-q", "When?", *times)
    unknown = upgraded("nightly", "run", "n")

    assert [ran.returncode for ran in (wrong, missing, asked, unknown)] == [Exit.USAGE] * 4
    assert "There is no schedule n." in unknown.stderr


def test_a_playbook_is_shown_and_checked_without_a_database(tmp_path: Path, platemaker: Run) -> None:
    (tmp_path / "mine.yaml").write_text("include: nda\nquestions:\n- question: Who is {party}?\n  type: number\n")

    listed = platemaker("playbook", "list", "--json")
    shown = platemaker("playbook", "show", "mine.yaml", "--set", "party=Acme", "--json")
    checked = platemaker("playbook", "check", "mine.yaml", "--json")
    fine = platemaker("playbook", "check", "nda", "cuad")

    assert [json.loads(line)["name"] for line in listed.stdout.splitlines()] == ["cuad", "nda"]
    questions = [json.loads(line) for line in shown.stdout.splitlines()]
    assert len(questions) == 18 and questions[0]["type"] == "yes_no"
    assert questions[0]["prompt"].startswith("Information must be marked: ")
    assert checked.returncode == Exit.USAGE
    problems = json.loads(checked.stdout)["problems"]
    assert [(problem["line"], problem["column"]) for problem in problems] == [(3, None), (4, 9)]
    assert (fine.returncode, fine.stdout) == (Exit.OK, "58 questions, no problem.\n")


def test_a_variable_that_nothing_uses_is_told(platemaker: Run) -> None:
    ran = platemaker("run", "contract.txt", "--questions", "nda", "--set", "party=Acme")

    assert ran.returncode == Exit.USAGE
    assert "no question uses {party}" in " ".join(ran.stderr.split())


def test_a_report_is_written_in_every_format_before_anything_is_answered(
    tmp_path: Path, valkey_server: Valkey, upgraded: Run
) -> None:
    submitted = upgraded("submit", "contract.txt", "absent.txt", "-q", "When?", broker_url=valkey_server.url)
    job_id = submitted.stdout.strip()
    paths = [tmp_path / f"out/a.{ending}" for ending in ("xlsx", "html", "csv", "jsonl", "md")]

    written = upgraded("report", job_id, *(part for path in paths for part in ("-o", str(path))), "--json")
    wrong = upgraded("report", job_id, "-o", "a.pdf")
    compared = upgraded("compare", job_id, job_id, "--json")

    assert json.loads(written.stdout)["rows"] == 2
    assert all(path.stat().st_size for path in paths)
    assert wrong.returncode == Exit.USAGE and "use .xlsx, .html, .csv, .jsonl, .md" in wrong.stderr
    assert json.loads(compared.stdout)["same"] == 2
