import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import trustme
from pydantic import SecretStr

from pipeline.local_servers import SeaweedFS
from storage.database import Database
from storage.errors import DatabaseRefused, DatabaseUnavailable, SettingsError, StoreUnusable
from storage.objects import open_store
from storage.settings import StorageSettings
from storage.tls import database_address

URL = "postgresql+pg8000://me:secret@db.example/name"


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def ca_file(authority: trustme.CA, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ca") / "ca.pem"
    authority.cert_pem.write_to_path(path)
    return path


@pytest.fixture(scope="module")
def pair(authority: trustme.CA, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Certificate and key of a server on loopback."""
    folder = tmp_path_factory.mktemp("pair")
    folder.chmod(0o755)
    made = authority.issue_cert("127.0.0.1", "localhost")
    certificate, key = folder / "server.pem", folder / "server.key"
    made.private_key_and_cert_chain_pem.write_to_path(certificate)
    made.private_key_pem.write_to_path(key)
    return certificate, key


@pytest.mark.parametrize(
    ("options", "has_ca", "verify", "hostname"),
    [
        ("", False, None, None),
        ("?sslmode=disable", True, None, None),
        ("?sslmode=require", False, ssl.CERT_NONE, False),
        ("?sslmode=require", True, ssl.CERT_REQUIRED, False),
        ("?sslmode=verify-ca", True, ssl.CERT_REQUIRED, False),
        ("?sslmode=verify-full", False, ssl.CERT_REQUIRED, True),
        ("", True, ssl.CERT_REQUIRED, True),
    ],
)
def test_the_modes_of_libpq_mean_what_they_mean_there(
    options: str, has_ca: bool, verify: ssl.VerifyMode | None, hostname: bool | None, ca_file: Path
) -> None:
    address = database_address(URL + options, ca_file if has_ca else None)

    assert address.url == URL
    found = address.encryption
    assert (found and found.verify_mode, found and found.check_hostname) == (verify, hostname)


def test_other_options_of_the_url_stay(ca_file: Path) -> None:
    address = database_address(f"{URL}?sslmode=verify-full&sslrootcert={ca_file}&application_name=night", None)

    assert address.url == f"{URL}?application_name=night"
    assert address.encryption is not None


@pytest.mark.parametrize("options", ["?sslmode=prefer", "?sslmode=verify-full&sslrootcert=/nowhere.pem"])
def test_what_cannot_be_done_is_refused_without_the_password(options: str) -> None:
    with pytest.raises(SettingsError, match="PLATEMAKER_DATABASE_URL: ssl") as caught:
        database_address(URL + options, None)

    assert "secret" not in str(caught.value)


def test_a_certificate_of_nobody_we_know_is_refused_and_of_our_authority_taken(
    ca_file: Path, authority: trustme.CA
) -> None:
    """PostgreSQL's side of it is played: what is tested is what we ask of the certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    listener = socket.create_server(("127.0.0.1", 0))
    outcomes: list[str] = []

    def serve() -> None:
        for _ in range(2):
            connection, _address = listener.accept()
            with connection:
                connection.recv(8)
                connection.sendall(b"S")  # PostgreSQL's answer to a request for encryption
                try:
                    with context.wrap_socket(connection, server_side=True):
                        outcomes.append("encrypted")
                except OSError:
                    outcomes.append("refused")

    thread = threading.Thread(target=serve)
    thread.start()
    url = SecretStr(f"postgresql://me:secret@127.0.0.1:{listener.getsockname()[1]}/name?sslmode=verify-full")
    messages = []
    for ca in (None, ca_file):
        with closing(Database(StorageSettings(database_url=url, tls_ca_file=ca, patience_s=0))) as database:
            with pytest.raises(DatabaseUnavailable) as caught:  # the second one hangs up behind the handshake
                database.check_schema()
            messages.append((type(caught.value), str(caught.value)))
    thread.join()
    listener.close()

    assert outcomes == ["refused", "encrypted"]
    assert messages[0][0] is DatabaseRefused and "PLATEMAKER_TLS_CA_FILE" in messages[0][1]
    assert not any("secret" in message for _, message in messages)


class SecureSeaweedFS(SeaweedFS):
    def __init__(self, folder: Path, pair: tuple[Path, Path], ca_file: Path) -> None:
        super().__init__(folder, "contracts")
        self.pair = pair
        self.ca_file = ca_file

    @property
    def endpoint_url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    def settings(self) -> StorageSettings:
        return super().settings().model_copy(update={"tls_ca_file": self.ca_file})

    def _command(self) -> list[str | Path]:
        certificate, key = self.pair
        return [*super()._command(), f"-s3.cert.file={certificate}", f"-s3.key.file={key}"]


@pytest.fixture
def secure_store(tmp_path: Path, pair: tuple[Path, Path], ca_file: Path) -> Iterator[SecureSeaweedFS]:
    server = SecureSeaweedFS(tmp_path / "s3", pair, ca_file)
    server.start()
    yield server
    server.stop()


def test_an_encrypted_store_works_with_its_authority_and_says_what_is_missing_without(
    secure_store: SecureSeaweedFS,
) -> None:
    with closing(open_store(secure_store.settings())) as store:
        store.put("folder/name", b"text")
        assert store.get("folder/name") == b"text"

    unknown = secure_store.settings().model_copy(update={"tls_ca_file": None, "patience_s": 0.0})
    with closing(open_store(unknown)) as store, pytest.raises(StoreUnusable, match="PLATEMAKER_TLS_CA_FILE"):
        store.get("folder/name")
