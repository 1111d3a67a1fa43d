"""Old data goes; a database that is busy is asked again later."""

import pytest

from allocscope.collector.observation import Observation
from allocscope.collector.retention import Retention, prune_captures_once, prune_once
from allocscope.storage.errors import StorageBusy, UploadLost
from allocscope.storage.sql import open_repository
from tests.collector.made import PROCESS_ID, RECEIVED_US, REF, batch
from tests.collector.test_fleet import PROCESS, healthy
from tests.storage.test_captures import bring, id_of, state


async def test_what_was_received_before_goes_and_the_rest_stays(tmp_path):
    repository, observation = open_repository(f"sqlite:///{tmp_path / 'c.db'}"), Observation()
    repository.store([batch(1, PROCESS, [healthy(1)]), batch(2, PROCESS, [healthy(2)])])
    await prune_once(repository, observation.retention, before_us=RECEIVED_US + 2_000_000)
    assert [chunk.sequence for chunk in repository.samples(REF)] == [(2,)]
    known = repository.process(PROCESS_ID)
    assert known
    assert known.process == PROCESS
    assert observation.registry.get_sample_value("allocscope_retention_seconds_count") == 1
    repository.close()


async def test_a_busy_database_is_counted_and_borne():
    class Busy:
        def prune(self, *, before_us):
            raise StorageBusy("busy")

    observation = Observation()
    await prune_once(Busy(), observation.retention, before_us=1)  # type: ignore[arg-type]
    assert observation.registry.get_sample_value("allocscope_retention_failures_total") == 1


RETENTION = Retention(keep_days=7, captures_keep_days=1, captures_limit_bytes=15)
DAY_US = 86_400_000_000


async def test_snapshots_go_by_age_and_by_size_and_what_is_left_is_told(tmp_path):
    repository, observation = open_repository(f"sqlite:///{tmp_path / 'c.db'}"), Observation()
    for number in range(1, 5):
        bring(repository, number, b"x" * 10, received_us=number * DAY_US)
    await prune_captures_once(repository.captures, observation, RETENTION, now_us=2 * DAY_US + DAY_US // 2)
    assert [state(repository, number)[0].value for number in range(1, 5)] == ["dropped", "dropped", "dropped", "kept"]
    found = observation.registry.get_sample_value
    assert found("allocscope_dropped_total", {"what": "captures", "reason": "age"}) == 1
    assert found("allocscope_dropped_total", {"what": "captures", "reason": "room"}) == 2
    assert found("allocscope_captures_stored_bytes") == 10
    repository.close()


async def test_uploads_that_nobody_completes_go_after_a_while(tmp_path):
    repository, observation = open_repository(f"sqlite:///{tmp_path / 'c.db'}"), Observation()
    upload = repository.captures.begin(id_of(1), received_us=DAY_US)
    await prune_captures_once(repository.captures, observation, RETENTION, now_us=DAY_US + 899_000_000)
    repository.captures.add(upload, 0, b"piece", received_us=DAY_US)
    await prune_captures_once(repository.captures, observation, RETENTION, now_us=DAY_US + 901_000_000)
    with pytest.raises(UploadLost):
        repository.captures.add(upload, 1, b"piece", received_us=DAY_US)
    repository.close()


async def test_a_busy_database_is_counted_and_borne_for_captures_too():
    class Busy:
        def prune(self, **_):
            raise StorageBusy("busy")

    observation = Observation()
    await prune_captures_once(Busy(), observation, RETENTION, now_us=1)  # type: ignore[arg-type]
    assert observation.registry.get_sample_value("allocscope_retention_failures_total") == 1
