from collections.abc import Iterator

from storage.objects.s3 import S3Store
from storage.settings import StorageSettings


class S3Bucket(S3Store):
    """A bucket that others fill, over the connections, retries and errors of the store."""

    def __init__(self, settings: StorageSettings, name: str) -> None:
        super().__init__(settings.model_copy(update={"store_url": f"s3://{name}"}))

    def listing(self, prefix: str = "") -> Iterator[tuple[str, int]]:
        with self._translated():
            pages = self._connection().client.get_paginator("list_objects_v2")
            for page in pages.paginate(Bucket=self._bucket, Prefix=prefix):
                yield from ((found["Key"], found["Size"]) for found in page.get("Contents", ()))

    def _where(self, key: str) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": key}
