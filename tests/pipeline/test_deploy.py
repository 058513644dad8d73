"""The examples in docs/deploy name only what there is: settings, commands, metrics, files, build arguments."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from prometheus_client import CollectorRegistry

from pipeline.cli import cli
from pipeline.settings import PipelineSettings
from storage.breaker import BreakerRule
from storage.database import Database
from storage.settings import StorageSettings
from tasks.app import app
from tasks.device_metrics import DeviceCollector
from tasks.metrics import REGISTRY
from tasks.queues import Pool
from tasks.row_metrics import row_registry
from tests.pipeline.test_readme import SETTINGS

DEPLOY = Path(__file__).resolve().parents[2] / "docs" / "deploy"
REPOSITORY = DEPLOY.parents[1]
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
MANIFESTS = [*yaml.safe_load_all((DEPLOY / "kubernetes" / "platemaker.yaml").read_text())]
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
NOT_SETTINGS = {"PLATEMAKER_CONFIG", "PLATEMAKER_IMAGE_TAG"}  # the second is the compose file's own
FUNCTIONS = {"sum", "min", "rate", "increase", "histogram_quantile", "vector", "by", "and", "or", "on", "le"}


def containers() -> Iterator[dict[str, Any]]:
    for manifest in MANIFESTS:
        template = manifest.get("spec", {}).get("template")
        if template:
            yield from template["spec"]["containers"]


def our_services() -> dict[str, dict[str, Any]]:
    return {name: service for name, service in COMPOSE["services"].items() if "build" in service}


def assert_is_command(words: list[str]) -> None:
    group: Any = typer.main.get_command(cli)
    for word in words:
        if word == "worker" or not isinstance(group, typer.core.TyperGroup):
            break
        assert word in group.commands, words
        group = group.commands[word]
    if words[0] == "worker":
        assert words[1] in [*Pool]


def test_every_setting_that_is_named_exists() -> None:
    files = [path for path in DEPLOY.rglob("*") if path.is_file()]
    named = {name for path in files for name in re.findall(r"PLATEMAKER_[A-Z0-9_]+", path.read_text())}

    assert len(files) >= 10
    assert named - NOT_SETTINGS <= {*SETTINGS}


def test_every_command_that_is_run_exists() -> None:
    commands = [service["command"] for service in our_services().values() if "entrypoint" not in service]
    commands += [container["args"] for container in containers()]
    for unit in UNITS:
        program, *words = re.findall(r"^ExecStart=(.*)$", unit.read_text(), re.MULTILINE)[0].split()
        assert program.endswith("/platemaker")
        commands.append([word.replace("%i", "prefill") for word in words])

    assert len(commands) >= 12
    for words in commands:
        assert_is_command(words)


def test_every_build_argument_is_one_of_the_dockerfile_and_every_copied_file_exists() -> None:
    arguments = set(re.findall(r"^ARG (\w+)", DOCKERFILE, re.MULTILINE))
    copied = [word for line in re.findall(r"^COPY (.*)$", DOCKERFILE, re.MULTILINE) for word in line.split()[:-1]]

    assert arguments == {"BASE", "TORCH_INDEX"}
    for service in our_services().values():
        assert {*service["build"]["args"]} <= arguments
        assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).samefile(DEPLOY / "Dockerfile")
    assert copied and all((REPOSITORY / name).exists() for name in copied)
    packages = {path.parent.name for path in REPOSITORY.glob("*/__init__.py")} - {"tests"}
    assert packages <= {*copied}


def test_nothing_runs_as_root_and_secrets_are_only_referred_to() -> None:
    assert re.search(r"^USER \d+$", DOCKERFILE, re.MULTILINE)
    for manifest in MANIFESTS:
        if "template" in manifest.get("spec", {}):
            assert manifest["spec"]["template"]["spec"]["securityContext"]["runAsNonRoot"] is True
    config = next(manifest for manifest in MANIFESTS if manifest["kind"] == "ConfigMap")["data"]
    secret = re.findall(r"^(\w+)=", (DEPLOY / "kubernetes" / "secret.env.example").read_text(), re.MULTILINE)
    assert not {*config} & {*secret}
    for service in our_services().values():
        for name, value in service.get("environment", {}).items():
            if re.search(r"URL|SECRET|AUTH", name) and re.search(r"(://[^$]*:[^$]*@)|SECRET_|AUTH", f"{name}={value}"):
                assert "${" in value, name
    for unit in UNITS:
        assert re.search(r"^User=platemaker$", unit.read_text(), re.MULTILINE)


def test_every_service_that_is_waited_for_and_every_volume_is_declared() -> None:
    for service in COMPOSE["services"].values():
        assert {*service.get("depends_on", [])} <= {*COMPOSE["services"]}
        for volume in service.get("volumes", []):
            source = re.split(r":(?=/)", volume)[0]
            assert source.startswith("${") or source in COMPOSE["volumes"]


def test_the_probes_ask_what_the_worker_answers() -> None:
    pools = [container for container in containers() if container["args"][0] == "worker"]

    assert {container["args"][1] for container in pools} == {"prefill", "decode"}
    for container in pools:
        assert container["livenessProbe"]["httpGet"]["path"] == container["startupProbe"]["httpGet"]["path"] == "/live"
        assert container["readinessProbe"]["httpGet"]["path"] == "/ready"


@pytest.fixture
def series(tmp_path: Path) -> set[str]:
    """Names that a scrape of a worker and of the exporter can hold."""
    devices = CollectorRegistry()
    devices.register(DeviceCollector())
    database = Database(StorageSettings(data_dir=tmp_path))
    database.upgrade()
    app.conf.update(broker_url="memory://", broker_transport=None)
    names = set()
    for registry in (REGISTRY, devices, row_registry(database, app, lease_s=30, breaker_rule=BreakerRule(5, 300, 30))):
        for family in registry.collect():
            ends = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}.get(family.type, [""])
            names |= {family.name + end for end in ends}
    database.close()
    return names


def expressions() -> Iterator[str]:
    dashboard = json.loads((DEPLOY / "grafana.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            yield target["expr"]
    for group in yaml.safe_load((DEPLOY / "alerts.yaml").read_text())["groups"]:
        for rule in group["rules"]:
            assert rule["annotations"]["summary"].endswith(".")
            yield rule["expr"]


def test_every_expression_of_dashboard_and_alerts_asks_for_a_metric_that_there_is(series: set[str]) -> None:
    asked = set()
    for expression in expressions():
        assert expression.count("(") == expression.count(")") and expression.count("{") == expression.count("}")
        plain = re.sub(r"\{[^}]*\}|\[[^]]*\]|\"[^\"]*\"", "", expression)
        named = set(re.findall(r"\bplatemaker_\w+", plain))
        assert named, expression
        asked |= named

    assert asked <= series


def test_every_metric_is_on_the_dashboard_or_said_not_to_be(series: set[str]) -> None:
    """A metric that nobody sees is not worth its name; these are for questions of the moment."""
    left_out = ("process_", "chunk_", "answers", "readings", "reading_tokens", "open_jobs", "snapshots", "loaded_bytes")
    asked = " ".join(expressions())

    families = {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in series}
    unseen = [name for name in families if name not in asked and not any(part in name for part in left_out)]
    assert not unseen


def test_flower_is_told_to_listen_where_its_port_is_published() -> None:
    flower = COMPOSE["services"]["flower"]

    assert flower["environment"]["PLATEMAKER_FLOWER_ADDRESS"] == "0.0.0.0"
    assert flower["ports"] == [f"127.0.0.1:{PipelineSettings().flower_port}:{PipelineSettings().flower_port}"]
