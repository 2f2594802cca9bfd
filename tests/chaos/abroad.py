"""A tenant on a host of its own: `python -m tests.chaos.abroad CLIENT_FILE FOLDER`, told what to do line by line.

In: on stdin, a line with a verb and its arguments. Out: lines of JSON: one whenever a job has moved on, one with what
came of it. Never: anything of the cluster but its client file.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import joynexus
from joynexus import Client
from joynexus.specs import EvaluateSpec
from tests.chaos import faulty_simulator
from tests.chaos.jobs import DATASET, numbers, push, sft
from tests.process.test_rl import numbers as curve
from tests.process.test_rl import rl

ENV = f"gymnasium/{faulty_simulator.__name__}:Faulty-v0"
LIMIT = 12
EPISODES = 8


def main(client_file: Path, folder: Path) -> None:
    """Do as told until there is nothing more."""
    with joynexus.connect(client_file) as client:
        say(connected=True)
        for line in sys.stdin:
            say(found=do(client, folder, *line.split()))


def do(client: Client, folder: Path, verb: str, policy: str, *count: str) -> object:
    """Do one thing; return what must not depend on where and how it was done."""
    match verb, *map(int, count):
        case "imitate", steps:
            push(client, folder / DATASET)
            job = sft(client, policy, steps)
            follow(job)
            found = numbers(client, job, policy, steps)
            return [found.losses, found.actions.hex()]
        case "learn", updates:
            job = client.submit(rl(policy, env=ENV, updates=updates, episodes=EPISODES, episode_limit=LIMIT))
            follow(job)
            assert job.wait(progress=False).state == "succeeded"
            return curve(job.updates)
        case "evaluate", episodes:
            return repr(
                client.submit(EvaluateSpec(policy=policy, env=ENV, episodes=episodes, episode_limit=LIMIT)).result
            )
        case unknown:
            raise ValueError(f"what is {unknown}?")


def follow(job: joynexus.Job) -> None:
    """Say whenever it has moved on."""
    for info in job.progress():
        say(done=info.done)


def say(**what: object) -> None:
    """Tell the test."""
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
