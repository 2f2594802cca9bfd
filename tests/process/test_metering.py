"""Over a mixed run in which workers are killed, what is charged is what all processes were busy, within a hundredth."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from joynexus import Client
from joynexus.keys import ClusterFile
from tests.chaos.cluster import Cluster, chaotic
from tests.chaos.jobs import push, sft
from tests.process.test_rl import ENV, rl
from tests.waiting import meanwhile, until

METERED = {"trainer": "trainer_s", "inference": "inference_s", "env": "env_s"}
LAST_S = 600.0
"""How long a job may take on a busy host."""


class Lives:
    """What each process that ever registered has last said about how busy it was."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.busy: dict[tuple[str, int], float] = {}

    def look(self) -> None:
        for role in self._client.status().roles:
            if role.role in METERED:
                key = (role.role, role.pid)
                self.busy[key] = max(role.busy_s, self.busy.get(key, 0.0))

    def watch(self, over: threading.Event) -> None:
        while not over.wait(0.05):
            self.look()

    def of(self, role: str) -> float:
        return sum(seconds for (of, _), seconds in self.busy.items() if of == role)


def charged(client: Client) -> dict[str, float]:
    """Seconds by role, over all tenants and the service."""
    lines = client.usage().lines
    return {role: sum(getattr(line, field) for line in lines) for role, field in METERED.items()}


def kill(cluster: Cluster, role: str) -> None:
    before = cluster.pid(role)
    os.kill(before, signal.SIGKILL)
    until(lambda: cluster.local.running(role) not in (0, before))


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(3 * LAST_S)
def test_all_busy_time_of_all_lives_is_charged(tmp_path: Path) -> None:
    pytest.importorskip("metaworld")
    with chaotic(tmp_path, JOYNEXUS_BEAT_MS="100") as cluster:
        client = cluster.client
        assert ClusterFile.load(cluster.local.client_file)  # its owner's key is an operator's: it sees all tenants
        lives = Lives(client)
        with meanwhile(lives.watch, seconds=LAST_S):
            push(client, tmp_path / "toy")
            tuned, learned = sft(client, "tuned", 200), client.submit(rl("learned", updates=3))
            until(lambda: tuned.info().done >= 40, LAST_S)
            kill(cluster, "trainer")
            until(lambda: learned.info().done >= 1, LAST_S)
            kill(cluster, "env")
            for job in (tuned, learned):
                assert job.wait(progress=False, timeout_s=LAST_S).state == "succeeded"
            shown = client.evaluate(policy="learned", env=ENV, episodes=4, episode_limit=24)
            assert shown.wait(progress=False, timeout_s=LAST_S).state == "succeeded"

            def settled() -> bool:
                """Everybody has rested for some beats: what nobody was charged with is charged to the service."""
                lives.look()
                pairs = [(seconds, lives.of(role)) for role, seconds in charged(client).items()]
                return all(abs(seconds - busy_s) <= 0.01 * busy_s for seconds, busy_s in pairs)

            print({role: (lives.of(role), seconds) for role, seconds in charged(client).items()})
            until(settled, 60.0)
        assert len({pid for role, pid in lives.busy if role in ("trainer", "env")}) == 4
        lines = client.usage().lines
        mine = {line.job: line for line in lines if line.tenant}
        assert mine[tuned.id].trainer_s > 0
        assert mine[learned.id].trainer_s > 0
        assert mine[learned.id].env_s > 0
        assert mine[learned.id].inference_s > 0
        assert mine[shown.id].env_s > 0
        service = {line.policy: line for line in lines if not line.tenant}
        assert service["loading"].trainer_s > 0
        print({role: (round(lives.of(role), 2), round(seconds, 2)) for role, seconds in charged(client).items()})
        print({line.policy: round(line.trainer_s + line.inference_s + line.env_s, 2) for line in service.values()})
