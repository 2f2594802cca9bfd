"""`joynexus up` and `down`: a cluster of local processes in one folder.

In: options. Out: keys, addresses and a plan in the folder; a health process that starts the roles and looks after
them; the wait until they work. Never: a second cluster in the same folder, a half-started one left behind, or one that
ran already taken down because it could not be completed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

import joynexus
from joynexus.client import connect
from joynexus.keyring import Addresses, Keyring
from joynexus.keys import ClusterFile
from joynexus.local import ClusterPlan, HealthReport, LocalCluster, RolePlan
from joynexus.scale import instance_name, parse_scale
from joynexus.wire import JoyNexusError

DOWN_S = 45.0
_NOT_WAITED_FOR = ("running", "leaving")
"""States of what is up, and of what may take half an hour to go: nothing more is expected of either."""


@dataclass(frozen=True)
class Options:
    """What `joynexus up` is told. Names and meanings are those of the roles' settings (`JOYNEXUS_<NAME>`).

    Attributes:
        scale: from how many to how many processes of a kind health may run, `env=1-4`; for others it runs as many as
            are named here.
    """

    backbone: str = "lite"
    image_side: int = 0
    device: str = "cpu"
    dtype: str = "float32"
    threads: int = 1
    trainers: int = 1
    inference: int = 1
    env_workers: int = 1
    scale: str = ""
    simulator_processes: int = 2
    max_slots: int = 16
    dashboard: bool = True
    datasets_dir: Path | None = None
    cache_dir: Path | None = None
    log_level: str = "info"
    timeout_s: float = 300.0


def up(folder: Path, options: Options, say: Callable[[str], None] = lambda _: None) -> LocalCluster:
    """Start a cluster and wait until all its roles work; if health alone had died, start only that.

    Args:
        folder: the cluster's folder, made if it is missing.
        options: what to run.
        say: called with a line on what is going on whenever that changes.

    Raises:
        ValueError: if it runs already, is being started, or could not be started; nothing new is left running then. If
            roles were taken over and others are missing, what ran goes on, and health goes on trying to start the
            others.
    """
    cluster = LocalCluster(folder)
    cluster.run.mkdir(parents=True, exist_ok=True)
    with _alone(cluster.run / "up.lock", folder):
        return _up(cluster, options, say)


def _up(cluster: LocalCluster, options: Options, say: Callable[[str], None]) -> LocalCluster:
    folder = cluster.folder
    if pid := cluster.running("health"):
        raise ValueError(f"a cluster is up in {folder} already (health is process {pid}): use it, or `joynexus down`")
    root = checkout()
    limits = parse_scale(options.scale, families=False)
    orphans = cluster.all_running()
    if orphans:
        say(f"taking over what still runs: {', '.join(orphans)}")
        cluster.load_plan()
    else:
        addresses = free_addresses(cluster.keys)
        make_keys(cluster, addresses)
        cluster.save_plan(make_plan(cluster, addresses, options, root))
    cluster.save_scale({**(cluster.load_scale() if orphans else {}), **limits})
    cluster.health_file.unlink(missing_ok=True)
    health = start_health(cluster, root, options.log_level)
    try:
        _wait_until_up(cluster, health, options.timeout_s, say)
    except BaseException as error:
        if not orphans:
            down(cluster.folder)
        elif isinstance(error, ValueError):
            raise ValueError(f"{error}; {_left(cluster, orphans)}, `joynexus down` ends everything") from error
        raise
    return cluster


@contextlib.contextmanager
def _alone(lock: Path, folder: Path) -> Iterator[None]:
    """Hold a lock, so that nobody takes down or readdresses the cluster that somebody else is just starting."""
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"`joynexus up` is at work in {folder} already: wait until it is done") from error
        yield


def down(folder: Path) -> list[str]:
    """End everything that runs in a cluster's folder.

    Returns:
        The names of the instances that ran.

    Raises:
        ValueError: if something could not be ended.
    """
    cluster = LocalCluster(folder)
    running = cluster.all_running()
    if "health" in running:  # it ends the roles in order, then itself
        cluster.stop(["health"], grace_s=DOWN_S)
    rest = cluster.all_running()
    cluster.stop([name for name in rest if name != "master"], grace_s=10.0)
    cluster.stop([name for name in rest if name == "master"], grace_s=10.0)
    left = cluster.all_running()
    if left:
        raise ValueError("could not end " + ", ".join(f"{name} (process {pid})" for name, pid in left.items()))
    cluster.health_file.unlink(missing_ok=True)
    return list(running)


def checkout() -> Path:
    """Return the folder of the checkout that this package belongs to.

    Raises:
        ValueError: if only the tenant's wheel is installed: the roles are not part of it.
    """
    root = Path(joynexus.__file__).resolve().parents[1]
    if not (root / "services" / "__init__.py").is_file():
        raise ValueError("the services are not part of the installed package: run `joynexus up` from a checkout")
    return root


def free_addresses(keys: Path) -> Addresses:
    """Return four free loopback addresses: those used last time or the usual ones if possible, else any."""
    candidates = [Addresses()]
    with contextlib.suppress(OSError, msgspec.MsgspecError):  # the first time here
        candidates.insert(0, msgspec.json.decode((keys / "addresses.json").read_bytes(), type=Addresses))
    for addresses in candidates:
        if all(_is_free(address) for address in msgspec.structs.astuple(addresses)):
            return addresses
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(4)]
    free = [f"tcp://127.0.0.1:{server.getsockname()[1]}" for server in sockets]
    for server in sockets:
        server.close()
    return Addresses(**dict(zip(Addresses.__struct_fields__, free, strict=True)))


def free_listen(cluster: LocalCluster) -> str:
    """Return where the dashboard can listen: where it did last time, so that a bookmark holds, or the usual place."""
    candidates = ["127.0.0.1:5714"]
    with contextlib.suppress(ValueError):  # the first time here
        candidates[:0] = [role.env["JOYNEXUS_LISTEN"] for role in cluster.load_plan().roles if role.role == "dashboard"]
    for listen in candidates:
        if _is_free(listen):
            return listen
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


def _is_free(address: str) -> bool:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    try:
        socket.create_server((host, int(port))).close()
    except (OSError, ValueError):
        return False
    return True


def make_keys(cluster: LocalCluster, addresses: Addresses) -> None:
    """Make what is missing: server keys, a key for each role, the owner's key, and `client.toml`."""
    keyring = Keyring(cluster.keys)
    keyring.prepare(addresses)
    if not keyring.cluster_file("default").exists():
        keyring.issue("default", tenant="default", operator=True)
    own = ClusterFile.load(keyring.cluster_file("default"))
    msgspec.structs.replace(own, key_file="keys/default/key.toml").save(cluster.client_file)


def make_plan(cluster: LocalCluster, addresses: Addresses, options: Options, root: Path) -> ClusterPlan:
    """Say what is to run, with which settings."""
    every = {
        "JOYNEXUS_STATE_DIR": str(cluster.folder / "state"),
        "JOYNEXUS_BLOBS_DIR": str(cluster.folder / "blobs"),
        "JOYNEXUS_LOG_LEVEL": options.log_level,
        "JOYNEXUS_METRICS": "",  # not the one inherited: they would all listen on one port
    }
    master = {f"JOYNEXUS_{name.upper()}": value for name, value in msgspec.structs.asdict(addresses).items()}

    def worker(role: str) -> dict[str, str]:
        return {
            "JOYNEXUS_CLUSTER_FILE": str(cluster.keys / role / "client.toml"),
            "JOYNEXUS_CACHE_DIR": str((options.cache_dir or cluster.folder / "cache").absolute()),
            "JOYNEXUS_THREADS": str(options.threads),
        }

    model = {
        "JOYNEXUS_BACKBONE": options.backbone,
        "JOYNEXUS_IMAGE_SIDE": str(options.image_side),
        "JOYNEXUS_DEVICE": options.device,
        "JOYNEXUS_DTYPE": options.dtype,
        "MKL_CBWR": reproducible_kernels(),
        "OMP_NUM_THREADS": str(options.threads),
        "MKL_NUM_THREADS": str(options.threads),
    }
    env = {"JOYNEXUS_SIMULATOR_PROCESSES": str(options.simulator_processes), "OMP_NUM_THREADS": "1"}
    if options.datasets_dir is not None:
        env["JOYNEXUS_DATASETS_DIR"] = str(options.datasets_dir.absolute())
    trainer = {"JOYNEXUS_MAX_SLOTS": str(options.max_slots)}
    roles = [RolePlan(name="master", role="master", env={**every, **master, "JOYNEXUS_KEYS_DIR": str(cluster.keys)})]
    for role, count, own in (
        ("trainer", options.trainers, {**model, **trainer}),
        ("inference", options.inference, model),
        ("env", options.env_workers, env),
    ):
        for number in range(1, count + 1):
            name = instance_name(role, number)
            roles.append(RolePlan(name=name, role=role, env={**every, **worker(role), **own}))
    if options.dashboard:
        listen = {"JOYNEXUS_LISTEN": free_listen(cluster)}
        env = {**every, **worker("dashboard"), **listen}
        roles.append(RolePlan(name="dashboard", role="dashboard", module="services.health.dashboard", env=env))
    return ClusterPlan(python=sys.executable, root=str(root), roles=tuple(roles))


def reproducible_kernels() -> str:
    """Return the MKL setting under which a row's result does not depend on the rows beside it."""
    try:
        wide = " avx512f " in Path("/proc/cpuinfo").read_text()
    except OSError:
        wide = False
    return "AVX512,STRICT" if wide else "AVX2,STRICT"


def start_health(cluster: LocalCluster, root: Path, log_level: str) -> subprocess.Popen[bytes]:
    """Start a health process; it adopts the roles that run, and starts the others."""
    env = {
        **os.environ,
        "JOYNEXUS_CLUSTER_DIR": str(cluster.folder),
        "JOYNEXUS_INSTANCE": "{host}/health",
        "JOYNEXUS_CLUSTER_FILE": str(cluster.keys / "health" / "client.toml"),
        "JOYNEXUS_CACHE_DIR": str(cluster.folder / "cache"),
        "JOYNEXUS_LOG_LEVEL": log_level,
        "JOYNEXUS_METRICS": "",
    }
    with cluster.log_file("health").open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "services.health"],
            cwd=root,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _wait_until_up(
    cluster: LocalCluster, health: subprocess.Popen[bytes], timeout_s: float, say: Callable[[str], None]
) -> None:
    deadline = time.monotonic() + timeout_s
    said = ""
    while True:
        report = cluster.load_health()
        if health.poll() is not None:
            raise ValueError(f"health ended (exit code {health.returncode}){cluster.last_words('health')}")
        if report is not None:
            line = _line(report)
            if line != said:
                say(line)
                said = line
            looping = [instance for instance in report.instances if instance.state == "crash-loop"]
            if looping:
                first = looping[0]
                raise ValueError(f"{first.name} cannot be started: {first.reason} (see {cluster.log_file(first.name)})")
            if all(instance.state in _NOT_WAITED_FOR for instance in report.instances):
                break
        if time.monotonic() > deadline:
            missing = "health said nothing" if report is None else _missing(report)
            raise ValueError(f"not up within {timeout_s:g} s: {missing} (see the logs in {cluster.run})")
        time.sleep(0.05)
    try:
        connect(cluster.client_file).close()
    except JoyNexusError as error:
        raise ValueError(str(error)) from error


def _missing(report: HealthReport) -> str:
    missing = [instance for instance in report.instances if instance.state not in _NOT_WAITED_FOR]
    return ", ".join(f"{i.name} ({i.state}{': ' * bool(i.reason)}{i.reason})" for i in missing)


def _left(cluster: LocalCluster, before: Iterable[str]) -> str:
    """Say what goes on of a cluster that was taken over."""
    running = cluster.all_running()
    left = ", ".join(name for name in before if name in running) or "nothing"
    return f"what ran before goes on ({left}){', looked after by health' if 'health' in running else ''}"


def _line(report: HealthReport) -> str:
    words = {"running": "ready"}
    return "  ".join(f"{instance.name} {words.get(instance.state, instance.state)}" for instance in report.instances)
