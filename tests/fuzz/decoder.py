"""Fuzzing of everything that reads foreign bytes: no other error than declared, no crash, little memory and time.

    python -m tests.fuzz.decoder run --seconds 60 [--seed N] [--engine own|atheris] [--findings FOLDER]
    python -m tests.fuzz.decoder replay FILE…       one input again, with its error
    python -m tests.fuzz.decoder corpus             writes the corpus anew

In: a corpus, dice. Out: a report, and a file for each finding that does it again. Never: an input that is lost with the
process that it kills: another process watches.

With atheris (`pip install 'joynexus[fuzz]'`) inputs are also led by which lines they reach; without it, by which
sentences they are refused with.
"""

from __future__ import annotations

import argparse
import faulthandler
import hashlib
import mmap
import os
import random
import re
import resource
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec

from tests.fuzz.mutation import MOST_BYTES, Mutator, pack, unpack

CORPUS = Path(__file__).parent / "corpus"
ROOT = Path(__file__).resolve().parents[2]

MEMORY_BYTES = 512 << 20
"""What all inputs together may add to the process."""
SLOW_S = 5.0
"""CPU time that one input may take."""
HANG_S = 120.0
"""Time after which an input hangs."""
_GROWN = 100
"""Inputs that a target's corpus may have in memory."""
LEAST = 30
"""So many inputs each target reads at least, however slow the machine."""


class Report(msgspec.Struct, kw_only=True):
    """What a run found.

    Attributes:
        executions: inputs read, by target.
        refusals: different sentences with which they were refused, by target.
        rss_mib: memory of the process, once it had begun and at its largest.
        slope_mib_h: by how much it grew in the second half, an hour.
        findings: files, with the error's last line.
    """

    engine: str
    seed: int
    seconds: float = 0.0
    executions: dict[str, int] = {}
    refusals: dict[str, int] = {}
    rss_mib: tuple[float, float] = (0.0, 0.0)
    slope_mib_h: float = 0.0
    findings: dict[str, str] = {}


def probe(data: bytes) -> str:
    """Read an input as the service would; return the sentences with which it is refused, if it is.

    Raises:
        Exception: whatever the reader does not declare: a finding.
    """
    from tests.fuzz.targets import TARGETS  # imports torch, which the watching process has no use for

    letter, parts = unpack(data)
    target = TARGETS.get(letter)
    if target is None:
        return ""
    try:
        return str(target.read(parts) or "")
    except target.declared as error:
        return f"{type(error).__name__}: {error}"


# The process that reads


def inputs(letter: str = "") -> dict[str, list[bytes]]:
    """The corpus, by letter."""
    found: dict[str, list[bytes]] = {}
    for path in sorted(CORPUS.glob(f"{letter or '?'}.*")):
        found.setdefault(path.name[0], []).append(path.read_bytes())
    return found


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * os.sysconf("SC_PAGE_SIZE") + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


class _Desk:
    """Where the watching process finds what is being read, and how much was."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)

    def put(self, data: bytes) -> None:
        self._map[8 : 8 + len(data)] = data
        self._map[:8] = len(data).to_bytes(8, "little")

    @staticmethod
    def make(path: Path) -> None:
        path.write_bytes(bytes(8 + MOST_BYTES + 16))

    @staticmethod
    def look(path: Path) -> bytes:
        data = path.read_bytes()
        return data[8 : 8 + int.from_bytes(data[:8], "little")]


def _begin(scratch: Path, desk: _Desk) -> None:
    """Read the whole corpus once, so that everything is imported and warm; then no more memory than so much."""
    from tests.fuzz.targets import prepare

    prepare(scratch)
    for each in inputs().values():
        for data in each:
            desk.put(data)
            probe(data)
    _limit_memory()


_NUMBER = re.compile(r"[0-9a-f]{32,}|\d+|'[^']*'|\"[^\"]*\"|\[[^]]*\]|\(.*\)")


def _read_on(seconds: float, seed: int, folder: Path, letter: str) -> None:
    """Read mutated inputs for a while; each target gets the same time. Counts are written down now and then."""
    until, desk = time.monotonic() + seconds, _Desk(folder / "desk")
    _begin(folder / "scratch", desk)
    chance, corpus = random.Random(seed), inputs(letter)
    mutator = Mutator(chance, corpus)
    used = dict.fromkeys(corpus, 0.0)
    executions: Counter[str] = Counter()
    known: dict[str, set[str]] = {each: set() for each in corpus}
    tell_at = 0.0
    while time.monotonic() < until or min(executions[each] for each in corpus) < LEAST:
        chosen = min(used, key=used.__getitem__)
        data = mutator.next(chosen)
        desk.put(data)
        faulthandler.dump_traceback_later(HANG_S, exit=True)
        before = time.process_time()
        refusal = probe(data)  # what it raises ends this process; the watching one keeps the input
        took = time.process_time() - before
        if took > SLOW_S:
            raise TimeoutError(f"it took {took:.1f} s of CPU time")
        used[chosen] += took + 2e-5
        executions[chosen] += 1
        sentence = _NUMBER.sub("#", refusal)[:80]
        if sentence not in known[chosen]:
            known[chosen].add(sentence)
            if len(corpus[chosen]) < _GROWN and len(data) < 20_000:
                corpus[chosen].append(data)
        if time.monotonic() > tell_at:
            tell_at = time.monotonic() + 1.0
            _tell(folder, executions, known)
    _tell(folder, executions, known)
    faulthandler.cancel_dump_traceback_later()


def _tell(folder: Path, executions: Mapping[str, int], known: Mapping[str, set[str]]) -> None:
    """Write down for the watching process how much was read."""
    counts = (executions, {each: len(sentences) for each, sentences in known.items()})
    (folder / "counts.new").write_bytes(msgspec.json.encode(counts))
    (folder / "counts.new").rename(folder / "counts")


def _read_led(seconds: float, seed: int, folder: Path) -> None:
    """The same under atheris, which never returns."""
    import atheris

    with atheris.instrument_imports(include=["joynexus", "common", "services"]):
        from tests.fuzz import targets

        assert targets.TARGETS
    desk, counts, tell_at = _Desk(folder / "desk"), Counter[str](), 0.0
    _begin(folder / "scratch", desk)
    corpus = inputs()

    def test_one(data: bytes) -> None:
        nonlocal tell_at
        data = data[:MOST_BYTES]
        desk.put(data)
        probe(data)
        counts[data[:1].decode("latin1")] += 1
        if time.monotonic() > tell_at:
            tell_at = time.monotonic() + 1.0
            _tell(folder, {each: n for each, n in counts.items() if each in corpus}, {})

    def mutate(data: bytes, most: int, seed: int) -> bytes:
        chance = random.Random(seed)
        if chance.random() < 0.5:
            return bytes(atheris.Mutate(data, most))
        return Mutator(chance, corpus).mutate(data)[:most]

    grown = folder / "grown"
    grown.mkdir(exist_ok=True)
    options = [
        f"-max_total_time={max(1, int(seconds))}",
        f"-seed={seed or 1}",
        f"-timeout={int(HANG_S)}",
        "-max_len=65536",
        "-rss_limit_mb=0",  # the limit on memory is ours
        f"-artifact_prefix={folder}/atheris-",
        "-verbosity=0",
        "-print_final_stats=0",
    ]
    atheris.Setup([sys.argv[0], *options, str(grown), str(CORPUS)], test_one, custom_mutator=mutate)
    atheris.Fuzz()


# The process that watches


def run(
    seconds: float,
    *,
    seed: int,
    findings: Path,
    engine: str = "own",
    letter: str = "",
    most: int = 20,
    say: Callable[[str], object] = print,
) -> Report:
    """Have another process read inputs for so long, and again after each finding, at most so many."""
    report, start, rounds = Report(engine=engine, seed=seed), time.monotonic(), 0
    sizes: list[tuple[float, float]] = []
    executions: Counter[str] = Counter()
    refusals: Counter[str] = Counter()
    while (left := seconds - (time.monotonic() - start)) > 1 and len(report.findings) < most:
        with tempfile.TemporaryDirectory(prefix="jnx-fuzz") as name:
            folder = Path(name)
            _Desk.make(folder / "desk")
            command = [sys.executable, "-m", "tests.fuzz.decoder", "_read", "--seconds", str(left), "--engine", engine]
            command += ["--seed", str(seed + rounds), "--findings", name, "--letter", letter]
            with (folder / "output").open("wb") as output:
                sizes.clear()  # of the last process
                code = _watch(command, output.fileno(), sizes, start)
            if (folder / "counts").exists():
                done, sentences = msgspec.json.decode((folder / "counts").read_bytes(), type=tuple[dict[str, int], ...])
                executions.update(done)
                refusals.update({each: max(0, n - refusals[each]) for each, n in sentences.items()})
            if code != 0:
                data = _Desk.look(folder / "desk")
                text = (folder / "output").read_text(errors="replace")
                where = findings / f"{data[:1].decode('latin1') or '-'}.{hashlib.sha256(data).hexdigest()[:12]}"
                findings.mkdir(parents=True, exist_ok=True)
                where.write_bytes(data)
                report.findings[str(where)] = _why(text, code)
                say(f"{text[-3000:]}\nFOUND (seed {seed + rounds}): {report.findings[str(where)]}\n{replayed(where)}")
        rounds += 1
    report.seconds = round(time.monotonic() - start, 1)
    report.executions, report.refusals = dict(executions), dict(refusals)
    report.rss_mib, report.slope_mib_h = _memory(sizes)
    return report


def replayed(path: Path) -> str:
    """Say how an input is read again."""
    return f"again: python -m tests.fuzz.decoder replay {path}"


def _watch(command: list[str], output: int, sizes: list[tuple[float, float]], start: float) -> int:
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
    try:
        while True:
            try:
                return process.wait(1.0)
            except subprocess.TimeoutExpired:
                sizes.append((time.monotonic() - start, rss_mib(process.pid)))
    finally:
        process.kill()
        process.wait()


def rss_mib(pid: int) -> float:
    """Memory that a process has now; 0 if it has gone."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def slope_per_hour(points: list[tuple[float, float]]) -> float:
    """Least squares through (seconds, value); 0 for fewer than three points."""
    if len(points) < 3:
        return 0.0
    mean_t, mean = (sum(column) / len(points) for column in zip(*points, strict=True))
    square = sum((t - mean_t) ** 2 for t, _ in points)
    return 3600 * sum((t - mean_t) * (value - mean) for t, value in points) / square if square else 0.0


def _memory(sizes: list[tuple[float, float]]) -> tuple[tuple[float, float], float]:
    alive = [(at, size) for at, size in sizes if size]
    if not alive:
        return (0.0, 0.0), 0.0
    begun = alive[min(len(alive) - 1, 20)][1]  # once it has imported everything
    slope = slope_per_hour(alive[len(alive) // 2 :])
    return (round(begun, 1), round(max(size for _, size in alive), 1)), round(slope, 1)


def _why(text: str, code: int) -> str:
    lines = [line for line in text.splitlines() if line and not line.startswith((" ", "="))]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Timeout)\w*\b", line)]
    return (errors or lines or [""])[-1][:300] + f" (exit code {code})"


# By hand


def _replay(paths: list[Path]) -> int:
    """Read inputs again, each as it was found: with everything warm and little memory."""
    files = {path: path.read_bytes() for path in paths}
    with tempfile.TemporaryDirectory(prefix="jnx-fuzz") as name:
        _Desk.make(Path(name) / "desk")
        _begin(Path(name) / "scratch", _Desk(Path(name) / "desk"))
        failed = 0
        for path, data in files.items():
            before = time.process_time()
            try:
                said = probe(data) or "read"
            except BaseException:
                failed += 1
                said = traceback.format_exc()
            print(f"{path.name} ({time.process_time() - before:.3f} s): {said}")
    return int(failed > 0)


def corpus() -> Iterator[tuple[str, bytes]]:
    """Make the corpus out of what the project itself writes: a name and an input each."""
    from tests.fuzz.targets import TARGETS, prepare

    with tempfile.TemporaryDirectory(prefix="jnx-fuzz") as name:
        prepare(Path(name))
        for letter, target in TARGETS.items():
            for index, parts in enumerate(target.seeds()):
                yield f"{letter}.{index}", pack(letter, parts)


def _write_corpus() -> None:
    CORPUS.mkdir(exist_ok=True)
    for name, data in corpus():
        (CORPUS / name).write_bytes(data)


def main() -> int:
    """Do what the command line says; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.decoder", description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=("run", "replay", "corpus", "_read"))
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=random.randrange(1, 10**6))
    parser.add_argument("--engine", choices=("own", "atheris"), default="own")
    parser.add_argument("--findings", type=Path, default=ROOT / "runs" / "fuzz")
    parser.add_argument("--letter", default="", help="of one target, see tests/fuzz/targets.py")
    chosen = parser.parse_args()
    if chosen.what == "corpus":
        _write_corpus()
    elif chosen.what == "replay":
        return _replay(chosen.files)
    elif chosen.what == "_read":
        if chosen.engine == "atheris":
            _read_led(chosen.seconds, chosen.seed, chosen.findings)
        _read_on(chosen.seconds, chosen.seed, chosen.findings, chosen.letter)
    else:
        found = run(
            chosen.seconds, seed=chosen.seed, findings=chosen.findings, engine=chosen.engine, letter=chosen.letter
        )
        print(msgspec.json.format(msgspec.json.encode(found)).decode())
        return int(bool(found.findings))
    return 0


if __name__ == "__main__":
    sys.exit(main())
