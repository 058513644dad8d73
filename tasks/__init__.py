"""How work is distributed: the Celery app, its queues, and the prefill, decode and upkeep tasks."""
