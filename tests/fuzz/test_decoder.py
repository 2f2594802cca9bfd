"""A minute of what an hour of `make fuzz` does: whatever bytes come, they are read or refused, in little memory."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.fuzz import decoder
from tests.fuzz.mutation import Mutator, pack, unpack

SECONDS = float(os.environ.get("FUZZ_S", "60"))
"""How long it takes; some of it goes by while everything is imported."""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_changed_bytes_are_read_or_refused_in_bounded_memory_and_time() -> None:
    seed = random.randrange(1, 10**6)
    print(f"seed {seed}")
    kept = decoder.ROOT / "runs" / "fuzz"
    report = decoder.run(SECONDS, seed=seed, findings=kept, most=3)
    assert not report.findings, "\n".join(
        [f"{why}\n{decoder.replayed(Path(path))}" for path, why in report.findings.items()]
    )
    assert set(report.executions) == set(decoder.inputs())
    assert min(report.executions.values()) >= decoder.LEAST, report


def test_the_corpus_is_small_and_has_inputs_for_every_reader() -> None:
    from tests.fuzz.targets import TARGETS  # imports torch, for which no other test of the ring has a use

    assert set(decoder.inputs()) == set(TARGETS)
    assert sum(path.stat().st_size for path in decoder.CORPUS.iterdir()) < 500_000


def test_an_input_is_written_and_read_again() -> None:
    for parts in ([], [b""], [b"", b""], [b"a", b"", b"bc"]):
        assert unpack(pack("m", parts)) == ("m", parts or [b""])


def test_inputs_follow_from_the_seed() -> None:
    corpus = decoder.inputs()
    one, other = (Mutator(random.Random(3), corpus) for _ in range(2))
    assert [one.next("m") for _ in range(50)] == [other.next("m") for _ in range(50)]
