import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from kernels.settings import KernelSettings
from pipeline.cli import cli
from pipeline.exits import Exit
from pipeline.settings import PipelineSettings
from storage.settings import StorageSettings
from tasks.settings import TaskSettings

README = Path(__file__).resolve().parents[2] / "README.md"
SETTINGS = [
    f"PLATEMAKER_{name.upper()}"
    for floor in (KernelSettings, TaskSettings, StorageSettings, PipelineSettings)
    for name in floor.model_fields
]
NAMES_THE_FILE = "PLATEMAKER_CONFIG"


@pytest.fixture(scope="module")
def readme() -> str:
    return README.read_text("utf-8")


def commands(group: typer.core.TyperGroup, prefix: str = "platemaker") -> Iterator[str]:
    for name, command in group.commands.items():
        if isinstance(command, typer.core.TyperGroup):
            yield from commands(command, f"{prefix} {name}")
        else:
            yield f"{prefix} {name}"


def test_every_setting_is_in_the_readme_and_no_other(readme: str) -> None:
    table = re.findall(r"^\| `(PLATEMAKER_\w+)` \|", readme, re.MULTILINE)
    mentioned = set(re.findall(r"PLATEMAKER_\w+", readme))

    missing = [name for name in SETTINGS if name not in table]
    unknown = sorted(mentioned - {*SETTINGS, NAMES_THE_FILE})
    assert not missing, f"README.md lacks a table row for: {', '.join(missing)}"
    assert not unknown, f"README.md names settings that do not exist: {', '.join(unknown)}"
    assert NAMES_THE_FILE in mentioned


def test_every_command_is_in_the_readme(readme: str) -> None:
    group = typer.main.get_command(cli)
    assert isinstance(group, typer.core.TyperGroup)

    missing = [command for command in commands(group) if not re.search(rf"{command}\b", readme)]
    assert not missing, f"README.md does not mention: {', '.join(missing)}"


def test_every_exit_code_is_in_the_readme_and_no_other(readme: str) -> None:
    table = {int(code) for code in re.findall(r"^\| (\d+) \|", readme, re.MULTILINE)}

    missing = [f"{code} ({code.name})" for code in Exit if code not in table]
    unknown = sorted(table - {*Exit})
    assert not missing, f"README.md's table of exit codes lacks: {', '.join(missing)}"
    assert not unknown, f"README.md's table of exit codes has codes that no command gives: {unknown}"


def test_the_chinese_readme_says_what_the_readme_says(readme: str) -> None:
    chinese = README.with_name("README.zh-CN.md").read_text("utf-8")
    group = typer.main.get_command(cli)
    assert isinstance(group, typer.core.TyperGroup)
    patterns = {
        "settings": r"^\| `(PLATEMAKER_\w+)` \|",
        "exit codes": r"^\| (\d+) \|",
        "options of reading": r"^\| `(--\w+)",
    }
    found = {
        what: (set(re.findall(pattern, readme, re.MULTILINE)), set(re.findall(pattern, chinese, re.MULTILINE)))
        for what, pattern in patterns.items()
    }

    assert all(english for english, _ in found.values())
    assert {what: english ^ translated for what, (english, translated) in found.items() if english != translated} == {}
    missing = [command for command in commands(group) if not re.search(rf"{command}\b", chinese)]
    assert not missing, f"README.zh-CN.md does not mention: {', '.join(missing)}"
