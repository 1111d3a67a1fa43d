"""The evaluator's thread: what it has no time for it says, and blames nobody else for."""

from allocscope.alerts.states import Alert
from allocscope.collector import evaluate
from allocscope.collector.evaluate import Evaluator
from allocscope.collector.foreseen import Foreseen
from allocscope.collector.observation import Observation
from allocscope.model import Device, Process, Sample, metrics
from allocscope.storage.sql import open_repository
from tests.alerts.stories import until
from tests.collector.made import PROCESS_ID, RECEIVED_US, batch

PROCESS = Process(PROCESS_ID, "calm", 4711, "host", 1, rank=0, devices=(Device("GPU-a", 0, total_bytes=100),))


def test_what_it_had_no_time_to_judge_is_said_to_be_its_own_loss_and_no_nodes(tmp_path, monkeypatch):
    monkeypatch.setattr(evaluate, "MOST_SAMPLES", 10)
    repository, observation = open_repository(f"sqlite:///{tmp_path / 'c.db'}"), Observation()
    told: list[Alert] = []
    evaluator = Evaluator(
        repository,
        observation,
        nodes=lambda: (),
        publish=told.extend,
        foreseen=Foreseen(repository.captures, observation, wake=lambda: None, enabled=False),
        now_us=lambda: RECEIVED_US,
        retire_after_s=300,
    )
    samples = [Sample(n, RECEIVED_US + n * 1_000_000, allocated_bytes=5, reserved_bytes=6) for n in range(1, 31)]
    evaluator.put([batch(n + 1, PROCESS, samples[n * 10 : n * 10 + 10]) for n in range(3)])
    evaluator.start()
    until(lambda: told)
    evaluator.close(10)
    repository.close()
    assert [alert.labels for alert in told] == [
        {"alertname": "AllocscopeDroppingData", "severity": "warning", "incident": "unwatched"}
    ]
    assert told[0].condition.summary.startswith("data is lost on the way from the collector: 20 samples dropped")
    lost = {"what": "samples", "reason": "evaluation_behind"}
    assert observation.registry.get_sample_value(metrics.DROPPED_TOTAL.name, lost) == 20
