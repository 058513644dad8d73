"""The ping task: proves that a queue is worked on, and that its worker reaches the database."""

from storage.database import utc_now
from storage.workers import answer_ping
from tasks.app import app


@app.task(name="platemaker.ping")  # type: ignore[untyped-decorator] # celery is untyped
def ping(ping_id: str) -> None:
    place = app.require_workplace()
    with place.database.writing() as session:
        answer_ping(session, ping_id, worker=place.worker_name, now=utc_now())
