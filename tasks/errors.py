"""Errors of the floor that distributes work.

TaskError
|-- BrokerUnavailable    no message can be sent or fetched
|-- WrongModel           the snapshot was made by another model than this worker's
|-- Unwanted             nobody waits any more for what is being made
`-- PromptChanged        the snapshot's document gives other tokens now
"""


class TaskError(Exception):
    """Work could not be distributed."""


class BrokerUnavailable(TaskError):
    """The broker does not answer. Check that it runs and that PLATEMAKER_BROKER_URL is right."""

    def __init__(self) -> None:
        super().__init__(self.__doc__)


class WrongModel(TaskError):
    def __init__(self, snapshot_id: int, field: str) -> None:
        super().__init__(f"Snapshot {snapshot_id} was made by another model or setting: {field} differs.")
        self.snapshot_id = snapshot_id
        self.field = field


class PromptChanged(TaskError):
    def __init__(self, snapshot_id: int) -> None:
        super().__init__(f"Snapshot {snapshot_id} was made of other tokens than its document gives now.")
        self.snapshot_id = snapshot_id


class Unwanted(TaskError):
    def __init__(self, document_id: str) -> None:
        super().__init__(f"No job waits for document {document_id} any more.")
        self.document_id = document_id
