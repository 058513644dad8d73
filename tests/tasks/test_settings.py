import pytest
from pydantic import ValidationError

from tasks.app import broker_settings
from tasks.settings import TaskSettings


def test_a_broker_that_would_deliver_long_tasks_twice_is_refused() -> None:
    with pytest.raises(ValidationError, match="PLATEMAKER_VISIBILITY_TIMEOUT_S is shorter than PLATEMAKER_LONGEST"):
        TaskSettings(visibility_timeout_s=60, longest_task_s=61)


def test_the_broker_is_told_how_long_to_wait() -> None:
    settings = TaskSettings.model_validate({"broker_url": "redis://host", "visibility_timeout_s": 7200})

    assert broker_settings(settings)["broker_transport_options"]["visibility_timeout"] == 7200
