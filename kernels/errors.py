"""Errors of the device floor.

KernelError
|-- ModelError                 the model cannot be used at all
|   |-- ModelMissing           no such folder, file or hub id
|   |-- ModelIncomplete        the folder lacks files or weights
|   |-- ModelUnsupported       its attention or state cannot be split exactly
|   |-- AdapterUnusable        it cannot be merged into this model
|   |-- DeviceUnavailable      the wanted device is not there
|   `-- CardsConflict          two settings name different cards
|-- ContextExceeded            prompt and answer do not fit the model's context
|-- MemoryExceeded             it will not fit into what is free on the device
|-- NonFiniteLogits            the model's numbers are NaN or infinite
|-- NonFiniteKV                the same in its KV, where a lossy codec would hide it
|-- ChatRefused              the model's template cannot take a conversation
|-- ParamsRefused              how answers shall be generated makes no sense
|-- ConstraintRefused          the wanted form of an answer cannot be enforced
|-- ConstraintFailed           an answer could not go on in that form
|-- BatchTooLarge              the questions under way need more memory than there is
|-- AnswerTooLarge             one question alone needs more memory than there is
|-- ChunkMismatch              bytes of a KV chunk or state do not fit this model
`-- ProbeMismatch              a loaded snapshot does not do what it did where it was made

SystemExit
`-- RankLost                   a process that holds a part of the model is gone, so this one has to end too
"""

from typing import Any


class KernelError(Exception):
    """Something on the device floor failed."""


class ModelError(KernelError):
    """The model cannot be used."""


class ModelMissing(ModelError):
    def __init__(self, name: str, hint: str) -> None:
        super().__init__(f"No model at {name!r}: {hint}.")
        self.name = name


class ModelIncomplete(ModelError):
    def __init__(self, name: str, missing: str) -> None:
        super().__init__(f"The model {name!r} is incomplete: {missing}. Download it again, or set PLATEMAKER_MODEL.")
        self.name = name
        self.missing = missing


class ModelUnsupported(ModelError):
    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"The model {name!r} cannot be used: {reason}.")
        self.name = name
        self.reason = reason


class AdapterUnusable(ModelError):
    def __init__(self, name: str, reason: str) -> None:
        super().__init__(
            f"The adapter {name!r} cannot be used: {reason}. Set PLATEMAKER_ADAPTER to another, or to none."
        )
        self.name = name
        self.reason = reason


class DeviceUnavailable(ModelError):
    def __init__(self, wanted: str, found: tuple[str, ...], *, hint: str = "") -> None:
        super().__init__(
            f"The device {wanted!r} is not available here (found: {', '.join(found)}). "
            f"{hint}Set PLATEMAKER_DEVICE, or --device, to one of these."
        )
        self.wanted = wanted
        self.found = found


class CardsConflict(ModelError):
    def __init__(self, what: str) -> None:
        super().__init__(f"{what}. Set one of them, or both alike.")
        self.what = what


class ContextExceeded(KernelError):
    def __init__(self, needed: int, context_len: int) -> None:
        super().__init__(
            f"The document with this question needs {needed:,} tokens, the model takes {context_len:,}. "
            "Use a model with a longer context or a shorter document."
        )
        self.needed = needed
        self.context_len = context_len


class MemoryExceeded(KernelError):
    def __init__(self, what: str, needed: int, available: int, device: str, advice: str) -> None:
        super().__init__(
            f"{what} needs {needed / 1e6:,.0f} MB more memory, and {available / 1e6:,.0f} MB are free on {device}: "
            f"{(needed - available) / 1e6:,.0f} MB are missing. {advice}, or use a device with more memory."
        )
        self.needed = needed
        self.available = available
        self.device = device


class NonFiniteLogits(KernelError):
    """The model computed NaN or infinite scores for this answer. Try PLATEMAKER_DTYPE=float32."""

    def __init__(self) -> None:
        super().__init__(self.__doc__)


class ChatRefused(KernelError):
    def __init__(self, roles: tuple[str, ...]) -> None:
        super().__init__(
            f"The model's chat template cannot take messages in this order: {', '.join(roles)}. "
            "Begin with the system or the user, and let user and assistant take turns."
        )
        self.roles = roles


class ParamsRefused(KernelError):
    """How answers shall be generated makes no sense."""


class ConstraintRefused(KernelError):
    """`what` is choices, regex or json_schema."""

    def __init__(self, what: str, reason: str) -> None:
        super().__init__(f"The answer's {what} cannot be used: {reason}.")
        self.what = what
        self.reason = reason


class ConstraintFailed(KernelError):
    def __init__(self, num_tokens: int, reason: str) -> None:
        super().__init__(
            f"After {num_tokens} tokens the answer could not go on in the wanted form: {reason}. "
            "Simplify its choices, regex or json_schema."
        )
        self.num_tokens = num_tokens
        self.reason = reason


class BatchTooLarge(KernelError):
    """`requests` are those under way, none of which has ended."""

    def __init__(self, requests: list[Any]) -> None:
        super().__init__(
            f"There is not enough memory for {len(requests)} questions at a time. Lower PLATEMAKER_MAX_BATCH."
        )
        self.requests = requests


class AnswerTooLarge(KernelError):
    def __init__(self, question_tokens: int, max_new_tokens: int) -> None:
        super().__init__(
            f"There is not enough memory for this question alone ({question_tokens:,} tokens, and up to "
            f"{max_new_tokens:,} of the answer, beside its document). Lower --max-tokens, or use a device with more "
            "memory."
        )
        self.question_tokens = question_tokens
        self.max_new_tokens = max_new_tokens


class NonFiniteKV(KernelError):
    """The document's KV holds NaN or infinite numbers. Try PLATEMAKER_DTYPE=float32 or PLATEMAKER_CODEC=none."""

    def __init__(self) -> None:
        super().__init__(self.__doc__)


class ChunkMismatch(KernelError):
    def __init__(self, what: str) -> None:
        super().__init__(f"What is stored of the document does not fit this model: {what}.")
        self.what = what


class ProbeMismatch(KernelError):
    def __init__(self, error: float, tolerance: float) -> None:
        super().__init__(
            f"The loaded snapshot gives other scores than when it was made (difference {error:.3g}, "
            f"allowed {tolerance:g}), so the document has to be read again."
        )
        self.error = error
        self.tolerance = tolerance


class RankLost(SystemExit):
    def __init__(self, count: int) -> None:
        super().__init__(
            f"One of the {count} processes that hold the model together has ended, so this one cannot go on. "
            "Start the worker again; its log says which one ended."
        )
        self.count = count
