import uuid

from storage.errors import StorageError
from storage.objects.base import ObjectStore


def check_store(store: ObjectStore) -> None:
    """Puts, gets and deletes an object.

    Raises:
        ObjectStoreError: the store cannot be used, with the reason.
        StorageError: it gave other bytes back.
    """
    key, sentinel = f"doctor/{uuid.uuid4().hex}", uuid.uuid4().bytes
    store.put(key, sentinel)
    found = store.get(key)
    store.delete(key)
    if found != sentinel:
        raise StorageError("The object store gave other bytes back than were put. Do not use it.")
