"""Refusing, before anything is taken, what will not fit into the memory of the device."""

from kernels.decode import ADMIT_TOKENS
from kernels.errors import MemoryExceeded
from kernels.memory import Need, check_room, decode_need, prefill_need
from kernels.model import LanguageModel
from kernels.phrases import MOST_QUOTE_TOKENS
from kernels.prompt import Prompter
from storage.database import utc_now
from storage.items import OpenItem, fail_document_items, queued_items
from storage.schema import SnapshotRow
from tasks.workplace import Workplace


def require_room_to_read(place: Workplace, num_tokens: int) -> None:
    """Snapshots kept in memory go where that helps.

    Raises:
        MemoryExceeded: a document of so many tokens cannot be read here.
    """
    settings = place.engine.settings
    for part in place.engine.model.parts:
        need = prefill_need(part, num_tokens, chunk_tokens=settings.chunk_tokens, codec=settings.codec)
        _require(place, part, need, f"Reading this document of {num_tokens:,} tokens")


def refuse_waiting(place: Workplace, row: SnapshotRow, reason: MemoryExceeded) -> None:
    """Ends the queued items of the snapshot's document."""
    with place.database.writing() as session:
        fail_document_items(
            session,
            tenant=row.tenant,
            document_id=row.document_id,
            model=place.engine.name,
            code="no_memory",
            error=str(reason),
            now=utc_now(),
        )


def fitting_batch(place: Workplace, row: SnapshotRow) -> int:
    """How many of the waiting questions fit at once behind a snapshot that is still to be loaded: as many as the
    settings allow, or half of it, and so on. Snapshots kept in memory go where that helps.

    Raises:
        MemoryExceeded: not even one.
    """
    engine, num_tokens = place.engine, row.num_tokens
    with place.database.reading() as session:
        items = queued_items(session, tenant=row.tenant, document_id=row.document_id, model=engine.name)
    questions = [len(engine.prompter.question_ids(item.question)) for item in items]
    owns = (_own_tokens(engine.prompter, item, asked) for item, asked in zip(items, questions, strict=True))
    longest = max(owns, default=1)
    batch = min(engine.settings.max_batch, max(len(items), 1))
    while True:
        slots = 1 << (batch - 1).bit_length()  # as a SuffixKV grows
        step_tokens = min(sum(questions), ADMIT_TOKENS) + max(questions, default=0)
        try:
            for part in engine.model.parts:
                need = decode_need(part, num_tokens, slots=slots, slot_tokens=longest, step_tokens=step_tokens)
                _require(place, part, need, f"Answering from this document of {num_tokens:,} tokens")
        except MemoryExceeded:
            if batch == 1:
                raise
            batch = slots // 2
        else:
            return engine.settings.max_batch if batch == len(items) else batch


def _own_tokens(prompter: Prompter, item: OpenItem, question_tokens: int) -> int:
    """Of the question with its longest answer, and with the longest quote where one will be asked for."""
    answer = int(item.params["max_new_tokens"])
    if item.params.get("quote"):
        return len(prompter.quote_ids(item.question, "")) + answer + MOST_QUOTE_TOKENS
    return question_tokens + answer


def _require(place: Workplace, model: LanguageModel, need: Need, what: str) -> None:
    try:
        check_room(need, model.device, what)
    except MemoryExceeded:
        kept = place.residents.keys()
        if not kept:
            raise
        place.residents.drop(kept)
        check_room(need, model.device, what)
