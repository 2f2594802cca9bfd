"""What an operator may set, a class per role: keyword arguments, else environment variables `JOYNEXUS_<NAME>`.

In: the environment. Out: frozen settings, units in their names, checked once at start. Never: a secret (keys are in
files), or a name that is silently ignored (`refuse_unknown`).
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Literal, TypeVar

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from common import failpoints

PREFIX = "JOYNEXUS_"
_DEVICE = re.compile(r"cpu|cuda:\d{1,2}")

_ELSEWHERE = frozenset({"JOYNEXUS_CONFIG", "JOYNEXUS_SHARED_DATA", "JOYNEXUS_GYMNASIUM_MODULES", failpoints.VARIABLE})
"""Variables with our prefix that are no role's setting: the tenant's cluster file, the tests' data, what
a family of simulators may import, the faults that a test asks for."""


class RoleSettings(BaseSettings):
    """What every role has.

    Attributes:
        state_dir: what must survive a restart of the host.
        blobs_dir: folder of blobs that all roles of this host share; empty: blobs travel over bulk sockets.
        log_level: `debug`, `info`, `warning` or `error`.
        json_logs: a JSON object a line (for machines) instead of readable lines.
        metrics: `host:port` of `/healthz`, `/readyz` and `/metrics`; empty: no such port. Whoever reaches it can read
            tenants' names there: keep it on loopback, or on a network of the cluster's own.
    """

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="forbid")
    role: ClassVar[str]

    state_dir: Path = Path(".joynexus/state")
    blobs_dir: Path | None = None
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    json_logs: bool = False
    metrics: str = Field(default="", pattern=r"^(.+:\d+)?$")


class MasterSettings(RoleSettings):
    """The master.

    Attributes:
        keys_dir: the folder of keys (`joynexus.keyring`).
        journal_url: where the journal is, if not in a file of `state_dir`: `postgresql://user@host:5432/database`. The
            password is in the file that PGPASSFILE names.
        front_control, front_bulk: where tenants are listened to.
        back_control, back_bulk: where workers are listened to.
        beat_ms: how often a worker beats.
        silent_s: a worker that was silent for so long is declared dead.
        stall_s: a master whose loop stands still for so long ends itself (exit code 124), to be started again.
        batch_rows: an inference group is sent as soon as it has so many rows.
        batch_wait_ms: or as soon as its oldest request has waited so long for requests that are expected; less
            where sharing a forward saves less time than that.
        max_uploads: uploads of one tenant that may be unfinished; with one more, an old one is given up.
        max_inflight_ops: ops of one policy that may wait unanswered.
        quota_bytes: blobs kept for one tenant.
        max_policies: policies of one tenant.
        max_connections: connections of one tenant, by all its keys together, or of one worker key. With one more, the
            one of them that said nothing for longest is ended. (All together have half of the open files at most.)
        max_requests_per_s, max_blob_requests_per_s: requests of one tenant, by all its keys together, on the control
            and on the bulk socket; it may ask as much as in two seconds at once. (These and the
            three limits above max_connections are for tenants without limits of their own.)
        max_kills: a piece of work is set aside once so many workers died over it alone. Whoever kills workers at
            random, as a soak test does, raises it: a death from outside looks like one of the work's doing.
    """

    role: ClassVar[str] = "master"

    keys_dir: Path = Path(".joynexus/keys")
    journal_url: str = ""
    front_control: str = "tcp://127.0.0.1:5710"
    front_bulk: str = "tcp://127.0.0.1:5711"
    back_control: str = "tcp://127.0.0.1:5712"
    back_bulk: str = "tcp://127.0.0.1:5713"
    beat_ms: int = Field(1000, ge=50)
    silent_s: float = Field(6.0, gt=0)
    stall_s: float = Field(20.0, ge=2)
    batch_rows: int = Field(8, ge=1)
    batch_wait_ms: float = Field(50.0, ge=0)
    max_inflight_ops: int = Field(64, ge=1)
    quota_bytes: int = Field(50 * 1024**3, ge=0)
    max_policies: int = Field(10_000, ge=0)
    max_connections: int = Field(1024, ge=1)
    max_requests_per_s: int = Field(3000, ge=1)
    max_blob_requests_per_s: int = Field(1000, ge=1)
    max_uploads: int = Field(16_384, ge=2)
    max_kills: int = Field(3, ge=1)


class WorkerSettings(RoleSettings):
    """What every worker has.

    Attributes:
        cluster_file: its cluster file, from the folder of keys: where the master is, and the worker's key.
        cache_dir: what may be deleted while the role does not run: fetched blobs, converted weights, features, scratch.
        cache_budget_bytes: fetched blobs kept there; the oldest go first.
        threads: threads of the work loop's mathematics.
        instance: what stays the same when this process is started anew, and no other process has: so the master knows
            whose place it takes. `{host}` stands for the host's name (a container's, a pod's), `{pid}` for the process.
    """

    role: ClassVar[str] = "worker"

    cluster_file: Path
    cache_dir: Path = Path(".joynexus/cache")
    cache_budget_bytes: int = Field(10 * 1024**3, ge=0)
    threads: int = Field(1, ge=1)
    instance: str = Field("{host}/{pid}", max_length=200)

    @property
    def instance_name(self) -> str:
        """Return the instance with its host and process filled in."""
        return self.instance.replace("{host}", socket.gethostname()).replace("{pid}", str(os.getpid()))


class ModelSettings(WorkerSettings):
    """What roles with a backbone have.

    Attributes:
        backbone: name, hub name or directory.
        image_side: side of the pictures that the backbone sees; 0 takes the backbone's own.
        device: `cpu`, `cuda`, `cuda:1`.
        dtype: of the backbone's weights.
        feature_budget_bytes: VLAFeatures kept on disk, shared by the roles of this host.
        feature_tenant_bytes: those kept of one tenant; 0: as many as others leave.
    """

    backbone: str = "lite"
    image_side: int = Field(0, ge=0)
    device: str = "cpu"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    feature_budget_bytes: int = Field(2 * 1024**3, ge=0)
    feature_tenant_bytes: int = Field(0, ge=0)


class TrainerSettings(ModelSettings):
    """The trainer.

    Attributes:
        max_slots: policies in memory at once.
        slot_bytes: memory that they may take: parameters, gradients and moments; 0: a third of the device's.
        devices: several that share the backbone's rows, `cuda:0,cuda:1`, instead of `device`; the first one trains too.
    """

    role: ClassVar[str] = "trainer"

    cluster_file: Path = Path(".joynexus/keys/trainer/client.toml")
    max_slots: int = Field(16, ge=1)
    slot_bytes: int = Field(0, ge=0)
    devices: str = ""

    @property
    def places(self) -> tuple[str, ...]:
        """Return where the backbone's rows are forwarded; policies are trained at the first."""
        return tuple(self.devices.split(",")) if self.devices else (self.device,)

    @field_validator("devices")
    @classmethod
    def _of_one_kind(cls, devices: str) -> str:
        places = devices.split(",") if devices else []
        kinds = {place.partition(":")[0] for place in places}
        gpus = [place for place in places if place.startswith("cuda")]
        if not all(_DEVICE.fullmatch(place) for place in places) or len(kinds) > 1 or len(set(gpus)) < len(gpus):
            raise ValueError("give different GPUs as 'cuda:0,cuda:1', or 'cpu,cpu' to try it out")
        return devices


class InferenceSettings(ModelSettings):
    """The inference service.

    Attributes:
        max_slots: versions in memory at once.
        keep_features: keep features of robots' and simulators' pictures on disk too, not only those of data sets (a
            robot hardly sees the same picture twice).
    """

    role: ClassVar[str] = "inference"

    cluster_file: Path = Path(".joynexus/keys/inference/client.toml")
    max_slots: int = Field(32, ge=1)
    keep_features: bool = False


class EnvSettings(WorkerSettings):
    """The env service.

    Attributes:
        datasets_dir: folder with data sets that the operator mounts; empty: none.
        simulator_processes: simulator worker processes at once.
        make_s, step_s: deadlines of making an environment and of one call to it. Health takes for wedged what shows no
            progress for 900 s, and a rollout may make environments twice in a row.
        reader_bytes: memory that the process may take which reads a data set.
    """

    role: ClassVar[str] = "env"

    cluster_file: Path = Path(".joynexus/keys/env/client.toml")
    datasets_dir: Path | None = None
    reader_bytes: int = Field(8 * 1024**3, ge=256 * 1024**2)
    simulator_processes: int = Field(2, ge=1)
    make_s: float = Field(180.0, gt=0, le=300)
    step_s: float = Field(30.0, gt=0, le=120)


class HealthSettings(WorkerSettings):
    """The health service.

    Attributes:
        cluster_dir: folder of a cluster on this machine whose processes it looks after.
        engine: or the Docker Engine's socket, `unix:///var/run/docker.sock`: the containers of its own compose project.
        scale: how many of a group there may be, `env=1-4,inference=1-3`; empty: nobody starts or stops any. (A local
            cluster is told by `joynexus up --scale` and `joynexus scale`.)
        scale_down_s: one leaves when for so long one less would have done.
        lost_s: a worker that the master has lost for so long, while its process lives, is killed and started again.
        master_silent_s: so is a master that has not answered for so long.
    """

    role: ClassVar[str] = "health"

    cluster_file: Path = Path(".joynexus/keys/health/client.toml")
    cluster_dir: Path | None = None
    engine: str = ""
    scale: str = ""
    scale_down_s: float = Field(60.0, gt=0)
    lost_s: float = Field(20.0, gt=0)
    master_silent_s: float = Field(30.0, gt=0)


class DashboardSettings(WorkerSettings):
    """The dashboard.

    Attributes:
        listen: `host:port` of its pages, `/healthz`, `/readyz` and `/metrics`.
        dashboard_url: by which address browsers reach it, if that is another (behind a proxy with TLS: `https://…`).
        dashboard_hosts: further names by which they may, with commas between them; the address's own name and the
            loopback's are always among them.
    """

    role: ClassVar[str] = "dashboard"

    cluster_file: Path = Path(".joynexus/keys/dashboard/client.toml")
    listen: str = "127.0.0.1:5714"
    dashboard_url: str = ""
    dashboard_hosts: str = ""


S = TypeVar("S", bound=RoleSettings)

ALL_SETTINGS = (MasterSettings, TrainerSettings, InferenceSettings, EnvSettings, HealthSettings, DashboardSettings)


def load_settings(kind: type[S]) -> S:
    """Read a role's settings from the environment.

    Raises:
        ValueError: one sentence that names the variable and what it should be.
    """
    refuse_unknown(os.environ)
    failpoints.arm(os.environ)
    try:
        return kind()
    except ValidationError as error:
        first = error.errors()[0]
        name = PREFIX + "_".join(str(part) for part in first["loc"]).upper()
        raise ValueError(f"the setting {name}={os.environ.get(name, '')!r} is not valid: {first['msg']}") from error


def refuse_unknown(environment: Mapping[str, str]) -> None:
    """Raise ValueError for a variable that starts with the prefix and that no role knows: it is a misspelt one."""
    known = {PREFIX + name.upper() for kind in ALL_SETTINGS for name in kind.model_fields} | _ELSEWHERE
    for name in sorted(environment):
        if name.upper().startswith(PREFIX) and name.upper() not in known:
            raise ValueError(f"no role has a setting {name}: correct its name or remove it from the environment")
