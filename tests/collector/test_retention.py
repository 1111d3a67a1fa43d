"""Old data goes; a database that is busy is asked again later."""

from allocscope.collector.observation import Observation
from allocscope.collector.retention import prune_once
from allocscope.storage.errors import StorageBusy
from allocscope.storage.sql import open_repository
from tests.collector.made import PROCESS_ID, RECEIVED_US, REF, batch
from tests.collector.test_fleet import PROCESS, healthy


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
