import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import trustme
from pydantic import SecretStr

from pipeline.local_servers import valkey
from tasks.app import app, configure
from tasks.errors import BrokerUnavailable
from tasks.queue_depth import queue_depths
from tasks.queues import ALL_QUEUES
from tasks.settings import TaskSettings
from tests.tls_proxy import encrypted


@dataclass(frozen=True)
class SecureBroker:
    password: str
    secure_url: str
    ca_file: Path


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureBroker]:
    """Valkey with a password; its package is built without encryption, so that stands before it."""
    folder, authority, password = tmp_path_factory.mktemp("valkey"), trustme.CA(), secrets.token_urlsafe(16)
    ca_file = folder / "ca.pem"
    authority.cert_pem.write_to_path(ca_file)
    with valkey(folder, password=password) as broker, encrypted(broker.port, authority) as port:
        yield SecureBroker(password, f"rediss://:{password}@127.0.0.1:{port}/0", ca_file)


@pytest.fixture(autouse=True)
def embedded_afterwards() -> Iterator[None]:
    yield
    configure(TaskSettings())


def settings(url: str, ca_file: Path | None = None) -> TaskSettings:
    return TaskSettings(broker_url=SecretStr(url), tls_ca_file=ca_file)


def test_an_encrypted_broker_with_a_password_is_used(server: SecureBroker) -> None:
    configure(settings(server.secure_url, server.ca_file))

    app.send_task("platemaker.decode", args=[1])

    depths = queue_depths(app)
    assert {*depths} == {*ALL_QUEUES} and sum(depths.values()) == 1


def test_a_certificate_of_an_unknown_authority_is_refused(server: SecureBroker) -> None:
    configure(settings(server.secure_url))

    with pytest.raises(BrokerUnavailable, match="PLATEMAKER_TLS_CA_FILE"):
        queue_depths(app)


@pytest.mark.parametrize("password", ["", "wrong-swordfish"])
def test_a_wrong_password_is_one_sentence_without_it(server: SecureBroker, password: str) -> None:
    right = server.password
    configure(settings(server.secure_url.replace(right, password), server.ca_file))

    with pytest.raises(BrokerUnavailable) as caught:
        queue_depths(app)

    assert str(caught.value).startswith("The broker does not answer")
    assert right not in str(caught.value) and (not password or password not in str(caught.value))
