"""The metrics of a worker: this file owns their names. Units are in the names; labels hold no tenant and no text.

One registry a process: a worker is one process with one model, so each has a port of its own, and Prometheus adds them
up. Its multi-process mode would share files between workers that come and go, and cannot ask a device at scrape time.
"""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, disable_created_metrics

disable_created_metrics()  # type: ignore[no-untyped-call] # a second series of each counter, which nobody asks for
REGISTRY = CollectorRegistry()
ProcessCollector(namespace="platemaker", registry=REGISTRY)

_LONG = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000)
_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)

SNAPSHOT_QUERIES = Counter(
    "platemaker_snapshot_queries", "Times that a document's snapshot was looked for.", registry=REGISTRY
)
SNAPSHOT_HITS = Counter("platemaker_snapshot_hits", "Times that it was ready.", registry=REGISTRY)
SNAPSHOT_MISSES = Counter(
    "platemaker_snapshot_misses",
    "Times that it had to be made: new, or it is unfinished, expired, removed, failed or quarantined.",
    ["reason"],
    registry=REGISTRY,
)
SNAPSHOT_SOURCES = Counter(
    "platemaker_snapshot_sources",
    "Snapshots that were answered from, by where they came from: this process's memory, local copies, the store.",
    ["source"],
    registry=REGISTRY,
)
PREFILL_SECONDS = Histogram(
    "platemaker_prefill_seconds",
    "Time to read one document, storing included.",
    buckets=_LONG,
    registry=REGISTRY,
)
PREFILL_TOKENS = Counter(
    "platemaker_prefill_tokens",
    "Prefix tokens, computed or reused.",
    ["source"],
    registry=REGISTRY,
)
CHUNK_BYTES = Counter("platemaker_chunk_stored_bytes", "Bytes of chunks put.", ["codec"], registry=REGISTRY)
CHUNK_SECONDS = Histogram(
    "platemaker_chunk_store_seconds", "Time to put one chunk.", ["codec"], buckets=_SHORT, registry=REGISTRY
)
LOAD_BYTES = Counter(
    "platemaker_snapshot_loaded_bytes", "Bytes of snapshots loaded and proved.", ["codec"], registry=REGISTRY
)
LOAD_SECONDS = Histogram(
    "platemaker_snapshot_load_seconds", "Time to load one snapshot.", ["codec"], buckets=_SHORT, registry=REGISTRY
)
TIER_BYTES = Counter(
    "platemaker_tier_bytes",
    "Bytes moved, by tier (s3, folder, or copies on local disk) and operation (put, get).",
    ["tier", "operation"],
    registry=REGISTRY,
)
TIER_SECONDS = Histogram(
    "platemaker_tier_seconds", "Time of one put or get.", ["tier", "operation"], buckets=_SHORT, registry=REGISTRY
)
FIRST_TOKEN_SECONDS = Histogram(
    "platemaker_first_token_seconds",
    "Time to first token, from when decode took the question up.",
    buckets=_SHORT,
    registry=REGISTRY,
)
INTER_TOKEN_SECONDS = Histogram(
    "platemaker_inter_token_seconds",
    "Time between two tokens of an answer (its mean over the answer).",
    buckets=_SHORT,
    registry=REGISTRY,
)
BATCH_SIZE = Histogram(
    "platemaker_decode_batch_questions",
    "Questions claimed at once for one decode batch.",
    buckets=(1, 2, 4, 8, 16, 32, 64, 128),
    registry=REGISTRY,
)
OUTPUT_TOKENS = Counter("platemaker_output_tokens", "Tokens generated in answers.", registry=REGISTRY)
ANSWERS = Counter("platemaker_answers", "Answers ended, by why generation stopped.", ["finish"], registry=REGISTRY)
PUT_BACK = Counter("platemaker_items_put_back", "Items whose worker's lease ran out.", registry=REGISTRY)
RETRIES = Counter("platemaker_retries", "Attempts after the first, by task.", ["task"], registry=REGISTRY)
FALLBACKS = Counter(
    "platemaker_fallbacks", "Times that work went another way than the wanted one.", ["reason"], registry=REGISTRY
)
BREAKER_STATE_NAME = "platemaker_breaker_state"
BREAKER_STATE_HELP = (
    "Circuit breaker: 0 closed, 1 half-open, 2 open. store: as a worker sees it; prefill: from the exporter."
)
BREAKER_STATE = Gauge(BREAKER_STATE_NAME, BREAKER_STATE_HELP, ["breaker"], registry=REGISTRY)
OUTAGES = Counter(
    "platemaker_outages", "Tasks given back because store or database could not be used.", ["kind"], registry=REGISTRY
)
REFUSED = Counter("platemaker_messages_refused", "Messages that are none of ours.", ["reason"], registry=REGISTRY)


def note_snapshot(miss: str | None) -> None:
    """A document's snapshot was looked for; None: it was ready."""
    SNAPSHOT_QUERIES.inc()
    if miss is None:
        SNAPSHOT_HITS.inc()
    else:
        SNAPSHOT_MISSES.labels(miss).inc()


def note_prefill(*, prefill_s: float, computed_tokens: int, num_tokens: int) -> None:
    PREFILL_SECONDS.observe(prefill_s)
    PREFILL_TOKENS.labels("computed").inc(computed_tokens)
    PREFILL_TOKENS.labels("reused").inc(num_tokens - computed_tokens)


def note_chunk(codec: str, size_bytes: int, seconds: float) -> None:
    CHUNK_BYTES.labels(codec).inc(size_bytes)
    CHUNK_SECONDS.labels(codec).observe(seconds)


def note_load(codec: str, size_bytes: int, seconds: float) -> None:
    LOAD_BYTES.labels(codec).inc(size_bytes)
    LOAD_SECONDS.labels(codec).observe(seconds)


def note_source(source: str) -> None:
    SNAPSHOT_SOURCES.labels(source).inc()


def note_transfer(tier: str, operation: str, size_bytes: int, seconds: float) -> None:
    TIER_BYTES.labels(tier, operation).inc(size_bytes)
    TIER_SECONDS.labels(tier, operation).observe(seconds)


def note_batch(questions: int) -> None:
    """So many questions were claimed together."""
    BATCH_SIZE.observe(questions)


def note_answer(*, finish: str, first_token_s: float, total_s: float, output_tokens: int) -> None:
    """One question that ended, however it ended."""
    ANSWERS.labels(finish).inc()
    OUTPUT_TOKENS.inc(output_tokens)
    if output_tokens:
        FIRST_TOKEN_SECONDS.observe(first_token_s)
    if output_tokens > 1:
        INTER_TOKEN_SECONDS.observe((total_s - first_token_s) / (output_tokens - 1))
