"""Files that somebody else puts into a bucket, under names of their own."""

from pathlib import Path

from storage.objects.s3 import S3Store
from storage.settings import StorageSettings


class S3Inbox(S3Store):
    """The files under s3://bucket/prefix, with the server and the keys of the settings. Only reads."""

    def __init__(self, settings: StorageSettings, url: str) -> None:
        super().__init__(settings.model_copy(update={"store_url": url}))

    def names(self) -> list[str]:
        """Keys of all files below the prefix, in their order."""
        with self._translated():
            pages = self._connection().client.get_paginator("list_objects_v2")
            found = [
                str(entry["Key"])
                for page in pages.paginate(Bucket=self._bucket, Prefix=self._prefix)
                for entry in page.get("Contents", ())
            ]
        return sorted(name for name in found if not name.endswith("/"))

    def url(self, name: str) -> str:
        return f"s3://{self._bucket}/{name}"

    def download(self, name: str, path: Path) -> None:
        """
        Raises:
            ObjectMissing: the file is gone.
        """
        with self._translated(name):
            self._connection().client.download_file(self._bucket, name, str(path))
