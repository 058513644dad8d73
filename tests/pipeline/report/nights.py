"""Jobs of a real database, with answers that a model could have given."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pipeline.documents.document import Document
from pipeline.questions import Question, load_questions
from storage.database import Database, utc_now
from storage.documents import get_text, put_text
from storage.items import NewAnswer, answer_item, claim_items, fail_item
from storage.jobs import NewQuestion, NewSection, NewSource, create_job
from storage.objects import ObjectStore, open_store
from storage.settings import StorageSettings

TENANT, MODEL = "acme", "tiny"
HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
PAGES = (
    f"SUPPLY AGREEMENT of 30 November 2026\nbetween Acme {HOSTILE} GmbH and Müller & Söhne.\n",
    "The liability of the Supplier is limited to EUR 2,500,000 🖋 in each Contract Year.\nThis Agreement is governed\n",
    "by the laws of England and Wales. 甲方应在收到发票后三十日内付款。\n",
)
ANSWERS = {
    "law": "It is governed by the laws of England and Wales.",
    "cap": "limited to EUR 2,500,000 🖋 in each Contract Year",
    "date": "30 November 2026",
    "assign": "No, not without consent.",
    "kind": "non-exclusive",
    "parties": f"Acme {HOSTILE} GmbH\nMüller & Söhne",
    "pay": "甲方应在收到发票后三十日内付款。",
    "free": "=1+1",
}
QUOTES = ({"assign": "SUPPLY AGREEMENT of 30 November"}, {"assign": "十日内付款"})  # of two sections
PLAYBOOK = """
questions:
  - {id: law, title: Governing law, question: "Which law governs?", quote: true}
  - {id: cap, title: Liability cap, type: money, question: "What is the cap?", quote: true}
  - {id: date, title: Date, type: date, question: "When was it made?"}
  - {id: assign, title: Assignment, type: yes_no, question: "May it be assigned?"}
  - {id: kind, title: Kind, type: choice, choices: [exclusive, non-exclusive], question: "Is it exclusive?"}
  - {id: parties, title: Parties, type: list, question: "Who are the parties?"}
  - {id: pay, title: 付款期限, question: 付款期限是多少天？}
  - {id: free, title: "=HYPERLINK(1)", question: "<b>What else?</b>"}
"""
SCAN = NewSource("in/scan.pdf", error_code="no_text_layer", error="scan.pdf looks scanned; run OCR over it first.")


@dataclass
class Night:
    """A data folder with a database and a store."""

    folder: Path
    database: Database = field(init=False)
    store: ObjectStore = field(init=False)
    questions: list[Question] = field(init=False)

    def __post_init__(self) -> None:
        settings = StorageSettings(data_dir=self.folder)
        self.database, self.store = Database(settings), open_store(settings)
        self.database.upgrade()
        playbook = self.folder / "playbook.yaml"
        playbook.write_text(PLAYBOOK)
        self.questions = load_questions([playbook], [])

    def source(self, name: str, pages: tuple[str, ...] = PAGES) -> NewSource:
        starts = tuple(sum(map(len, pages[:number])) for number in range(len(pages)))
        document = Document("".join(pages), starts, (), "txt")
        put_text(self.store, TENANT, document.document_id, document.text)
        return NewSource(name, document.document_id, len(document.text), starts)

    def text(self, source: NewSource) -> str:
        return get_text(self.store, TENANT, str(source.document_id))

    def job(self, sources: list[NewSource], answers: dict[str, dict[str, str | None]]) -> str:
        """A job with answers by document and question id. None: an error. Documents left out wait."""
        with self.database.writing() as session:
            job_id = create_job(
                session,
                tenant=TENANT,
                model=MODEL,
                title="Night",
                sources=sources,
                questions=[
                    NewQuestion(q.question_id, q.title, q.text, {"max_new_tokens": 8}, spec=q.spec.record())
                    for q in self.questions
                ],
                now=utc_now(),
            )
        for source in sources:
            if source.name in answers and source.document_id:
                self.answer(source.document_id, answers[source.name])
        return job_id

    def answer(self, document_id: str, answers: dict[str, str | None], quotes: dict[str, str] | None = None) -> None:
        """`quotes` are words of the document that the model named, by question id."""
        taken: dict[str, Any] = {"tenant": TENANT, "document_id": document_id, "model": MODEL, "owner": "w"}
        with self.database.writing() as session:
            items = claim_items(session, **taken, limit=99, now=utc_now(), lease_s=60)
            for item, question in zip(items, self.questions, strict=True):
                text = answers[question.question_id]
                if text is None:
                    fail_item(session, item.item_id, owner="w", code="x", error="It did not fit.", now=utc_now())
                else:
                    made = NewAnswer(text, "stop", None, 1000, 12, 4, 0.2, 1.0, "host-1")
                    if quotes and question.question_id in quotes:
                        words = quotes[question.question_id]
                        start = get_text(self.store, TENANT, document_id).index(words)
                        place = {"quote": words, "quote_start": start, "quote_stop": start + len(words)}
                        made = replace(made, quote_prompt="quote-1", **place)
                    answer_item(session, item.item_id, owner="w", answer=made, now=utc_now())


def split_job(night: Night) -> str:
    """A document of three pages in two sections that overlap, both answered."""
    whole = night.source("in/long.pdf")
    text = night.text(whole)
    middle = text.index("The liability")
    parts = [(0, middle + 40), (middle, len(text))]
    sections = [night.source(f"part {start}", (text[start:stop],)) for start, stop in parts]
    made = tuple(
        NewSection(str(part.document_id), start, stop) for part, (start, stop) in zip(sections, parts, strict=True)
    )
    nothing = dict.fromkeys((question.question_id for question in night.questions), "Not found")
    first = {**nothing, "date": "30 November 2026", "assign": "No, not without consent."}
    second = {**nothing, "law": "the laws of England and Wales", "assign": "Yes, it may be assigned.", "cap": None}
    job_id = night.job([replace(whole, sections=made)], {})
    for part, answers, quotes in zip(sections, (first, second), QUOTES, strict=True):
        night.answer(str(part.document_id), answers, quotes)
    return job_id
