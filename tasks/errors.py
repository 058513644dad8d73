"""Errors of the floor that distributes work.

TaskError
|-- BrokerUnavailable    no message can be sent or fetched
|-- OtherModelServed     live workers compute with another model or other settings
|-- PortTaken            the metrics port is in use
|-- WrongModel           the snapshot was made by another model than this worker's
|-- ReadingEnded         a document is not read to its end here, and who should know has been told
|-- Unwanted             nobody waits any more for what is being made
`-- PromptChanged        the snapshot's document gives other tokens now
"""


class TaskError(Exception):
    """Work could not be distributed."""


class BrokerUnavailable(TaskError):
    """The broker does not answer. Check that it runs and that PLATEMAKER_BROKER_URL is right, and
    PLATEMAKER_TLS_CA_FILE, where it is encrypted."""

    def __init__(self) -> None:
        super().__init__(" ".join((self.__doc__ or "").split()))


class OtherModelServed(TaskError):
    def __init__(self, worker: str, model: str) -> None:
        super().__init__(
            f"Worker {worker} is alive and computes with {model} and other settings than this one would. Give all "
            "workers the same model, type, codec and system prompt, or stop the others first."
        )
        self.worker = worker
        self.model = model


class PortTaken(TaskError):
    def __init__(self, address: str, port: int) -> None:
        super().__init__(
            f"Port {port} on {address} cannot be listened on. Set PLATEMAKER_METRICS_PORT and "
            "PLATEMAKER_METRICS_ADDRESS to a free one, each worker of a machine to its own."
        )
        self.port = port


class WrongModel(TaskError):
    def __init__(self, snapshot_id: int, field: str) -> None:
        super().__init__(f"Snapshot {snapshot_id} was made by another model or setting: {field} differs.")
        self.snapshot_id = snapshot_id
        self.field = field


class PromptChanged(TaskError):
    def __init__(self, snapshot_id: int) -> None:
        super().__init__(f"Snapshot {snapshot_id} was made of other tokens than its document gives now.")
        self.snapshot_id = snapshot_id


class ReadingEnded(TaskError):
    def __init__(self, document_id: str) -> None:
        super().__init__(f"Document {document_id} was not read to its end.")
        self.document_id = document_id


class Unwanted(TaskError):
    def __init__(self, document_id: str) -> None:
        super().__init__(f"No job waits for document {document_id} any more.")
        self.document_id = document_id
