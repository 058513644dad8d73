from pathlib import Path

import pytest
from pydantic import SecretStr, ValidationError

from storage.errors import SettingsError
from storage.settings import StorageSettings


@pytest.fixture
def config_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "elsewhere.toml"
    monkeypatch.setenv("PLATEMAKER_CONFIG", str(path))
    return path


def test_everything_lies_in_the_data_folder_by_default(tmp_path: Path) -> None:
    settings = StorageSettings(data_dir=tmp_path)

    assert settings.resolved_database_url() == f"sqlite:///{tmp_path}/platemaker.db"
    assert settings.resolved_store_url() == f"{tmp_path}/objects"


def test_the_data_folder_follows_the_desktop_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PLATEMAKER_DATA_DIR")
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/analyst")
    assert StorageSettings().data_dir == Path("/home/analyst/.local/share/platemaker")

    monkeypatch.setenv("XDG_DATA_HOME", "/srv/data")
    assert StorageSettings().data_dir == Path("/srv/data/platemaker")


def test_the_environment_wins_over_the_file(config_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config_file.write_text('s3_region = "from-file"\ns3_max_connections = 3\nsomething_of_another_floor = 1\n')
    monkeypatch.setenv("PLATEMAKER_S3_REGION", "from-environment")

    settings = StorageSettings()

    assert settings.s3_region == "from-environment"
    assert settings.s3_max_connections == 3


def test_the_file_in_the_working_directory_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "platemaker.toml").write_text('store_url = "s3://contracts/night"\n')
    monkeypatch.chdir(tmp_path)

    assert StorageSettings().store_url == "s3://contracts/night"


def test_a_named_file_that_is_not_there_stops_the_start(config_file: Path) -> None:
    with pytest.raises(SettingsError, match="PLATEMAKER_CONFIG"):
        StorageSettings()


def test_an_empty_variable_is_an_unset_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLATEMAKER_DATABASE_URL", "")
    monkeypatch.setenv("PLATEMAKER_S3_MAX_CONNECTIONS", "")

    assert StorageSettings().database_url is None
    assert StorageSettings().s3_max_connections == 16


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("PLATEMAKER_S3_MAX_CONNECTIONS", "many"),
        ("PLATEMAKER_S3_MAX_CONNECTIONS", "0"),
        ("PLATEMAKER_DATABASE_URL", "mysql://user:hidden@host/name"),
        ("PLATEMAKER_STORE_URL", "objects"),
        ("PLATEMAKER_STORE_URL", "https://host/bucket"),
        ("PLATEMAKER_STORE_URL", "s3://Bucket"),
        ("PLATEMAKER_STORE_URL", "file://host/folder"),
        ("PLATEMAKER_S3_ENDPOINT_URL", "localhost:8333"),
        ("PLATEMAKER_S3_ENDPOINT_URL", "http://key:hidden@host:8333"),
    ],
)
def test_a_wrong_value_names_its_variable_and_stays_hidden(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)

    with pytest.raises(ValidationError, match=variable) as caught:
        StorageSettings()

    assert value not in str(caught.value)
    assert value not in repr(caught.value)


@pytest.mark.parametrize("variable", ["PLATEMAKER_S3_ACCESS_KEY_ID", "PLATEMAKER_S3_SECRET_ACCESS_KEY"])
def test_half_a_pair_of_keys_is_refused(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "hidden-half")

    with pytest.raises(ValidationError, match="set both PLATEMAKER_S3_ACCESS_KEY_ID") as caught:
        StorageSettings()

    assert "hidden-half" not in str(caught.value)


def test_secrets_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLATEMAKER_DATABASE_URL", "postgresql://user:hidden-1@host:5432/name?sslkey=hidden-2")
    monkeypatch.setenv("PLATEMAKER_S3_ACCESS_KEY_ID", "hidden-3")
    monkeypatch.setenv("PLATEMAKER_S3_SECRET_ACCESS_KEY", "hidden-4")

    settings = StorageSettings()

    for shown in (str(settings), repr(settings), settings.model_dump_json(), settings.safe_database_url()):
        assert "hidden" not in shown
    assert settings.safe_database_url() == "postgresql+pg8000://host:5432/name"


@pytest.mark.parametrize(
    ("given", "resolved"),
    [
        ("postgresql://u:p@h/d", "postgresql+pg8000://u:p@h/d"),
        ("postgres://u:p@h/d", "postgresql+pg8000://u:p@h/d"),
        ("postgresql+psycopg://u:p@h/d", "postgresql+psycopg://u:p@h/d"),
        ("sqlite:////srv/p.db", "sqlite:////srv/p.db"),
    ],
)
def test_a_database_url_gets_our_driver_unless_it_names_one(given: str, resolved: str) -> None:
    assert StorageSettings(database_url=SecretStr(given)).resolved_database_url() == resolved


def test_settings_do_not_change(tmp_path: Path) -> None:
    settings = StorageSettings(data_dir=tmp_path)

    with pytest.raises(ValidationError, match="frozen"):
        settings.s3_region = "elsewhere"  # type: ignore[misc]


def test_every_setting_is_described() -> None:
    assert all(field.description for field in StorageSettings.model_fields.values())


def test_limits_of_tenants_come_from_json_or_a_table(config_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config_file.write_text('[tenant_limits."*"]\nrunning = 4\n[tenant_limits.acme]\nweight = 2\n')
    limits = StorageSettings().limits
    assert (limits.of("other").running, limits.of("acme").running, limits.of("acme").weight) == (4, None, 2.0)

    monkeypatch.setenv("PLATEMAKER_TENANT_LIMITS", '{"acme": {"queued_items": 7}}')
    monkeypatch.setenv("PLATEMAKER_MAX_QUEUED_ITEMS", "100")
    limits = StorageSettings().limits
    assert (limits.of("acme").queued_items, limits.of("other").queued_items, limits.queued_items) == (7, None, 100)


@pytest.mark.parametrize("wrong", ["[]", "three", '{"acme": 3}', '{"acme": {"running": 0}}', '{"acme": {"rate": 1}}'])
def test_limits_that_cannot_be_meant_name_the_variable(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLATEMAKER_TENANT_LIMITS", wrong)

    with pytest.raises(ValidationError, match="PLATEMAKER_TENANT_LIMITS"):
        StorageSettings()
