"""The embodiment contract: what an action and an observation mean.

In: what a data set, a simulator or a robot says of itself. Out: one typed, hashed manifest that travels with every
policy version, data set, rollout and evaluation record. Never: torch, I/O, or a silent default for a convention on
which a policy and an environment could disagree.

Most "90 % here, 0 % there" reports of this field are a contract that nobody wrote down: a flipped image, another
gripper sign, statistics of another data set. So a policy and an environment are compared field by field before they
meet (`first_difference`), and normalisation happens once, inside the service.
"""

from __future__ import annotations

from typing import Literal

import blake3
import msgspec

from joynexus.bounds import Few, Many, Short

NormalizationMode = Literal["mean_std", "min_max", "quantile", "none"]


class Camera(msgspec.Struct, frozen=True, kw_only=True):
    """One camera, in the order the policy sees it.

    Attributes:
        name: key of the camera in observations and data sets (`corner2`, `ego_view`).
        height, width: pixels of the picture that the policy receives (after any resize).
        rotation_deg: clockwise rotation applied to the simulator's or data set's picture before the policy sees it.
    """

    name: Short
    height: int
    width: int
    rotation_deg: Literal[0, 90, 180, 270] = 0


class Contract(msgspec.Struct, frozen=True, kw_only=True):
    """What observations and actions of one embodiment mean.

    Attributes:
        robot: name of the embodiment (`sawyer`, `GR1ArmsOnly`).
        cameras: cameras in order; empty for policies that see no picture.
        state_dim, action_dim: lengths of the state and action vectors.
        state_names, action_names: what each dimension is; empty if the source does not say.
        control_mode: how an action moves the robot (`delta_ee_position`, `joint_position`, `unspecified`).
        gripper: meaning of the gripper's number (`-1_open_+1_close`, `none`, `unspecified`).
        rotation: convention of rotations in state and action (`none`, `axis_angle`, `quat_wxyz`, `unspecified`).
        action_low, action_high: limits that the environment clips to; empty if unlimited.
        rate_hz: control steps per second.
        episode_limit: steps after which an episode ends unsuccessful; 0 if the source has none.
        rendering: switches that change pixels, as `name=value` (`shadows=off`), sorted.
    """

    robot: Short
    cameras: Few[Camera]
    state_dim: int
    action_dim: int
    state_names: Many[Short] = ()
    action_names: Many[Short] = ()
    control_mode: Short = "unspecified"
    gripper: Short = "unspecified"
    rotation: Short = "unspecified"
    action_low: Many[float] = ()
    action_high: Many[float] = ()
    rate_hz: float = 0.0
    episode_limit: int = 0
    rendering: Few[Short] = ()

    def digest(self) -> str:
        """Return the hash (32 hex digits) that names this contract in records."""
        return struct_digest(self)


class VectorStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Per-dimension statistics of one vector over a data set; every tuple has the vector's length."""

    mean: Many[float]
    std: Many[float]
    min: Many[float]
    max: Many[float]
    q01: Many[float]
    q99: Many[float]


class Statistics(msgspec.Struct, frozen=True, kw_only=True):
    """Normalisation statistics of state and action over `count` samples. Frozen before anything is trained on them."""

    count: int
    state: VectorStatistics
    action: VectorStatistics

    def digest(self) -> str:
        """Return the hash (32 hex digits) that names these statistics in records."""
        return struct_digest(self)


def struct_digest(value: msgspec.Struct) -> str:
    """Hash a struct by its canonical MessagePack form (field order of the class, map-encoded), 32 hex digits."""
    return blake3.blake3(msgspec.msgpack.encode(value)).hexdigest()[:32]


# Fields in which a policy's contract may differ from an environment's without harm: names are labels, a rate or limit
# that one side does not state (0) says nothing.
_LABELS = frozenset({"state_names", "action_names"})
_UNSTATED: dict[str, object] = {
    "rate_hz": 0.0,
    "episode_limit": 0,
    "control_mode": "unspecified",
    "gripper": "unspecified",
    "rotation": "unspecified",
    "action_low": (),
    "action_high": (),
    "rendering": (),
}


def first_difference(policy: Contract, environment: Contract) -> str | None:
    """Compare two contracts field by field.

    Returns:
        None if the policy may act in the environment; else one sentence that names the first field that differs and
        both values.
    """
    for field in Contract.__struct_fields__:
        if field in _LABELS:
            continue
        mine, theirs = getattr(policy, field), getattr(environment, field)
        if mine == theirs:
            continue
        if field in _UNSTATED and _UNSTATED[field] in (mine, theirs):
            continue
        return f"contract field '{field}' differs: the policy has {_show(mine)}, the environment has {_show(theirs)}"
    return None


def why_unfit(policy: Contract, environment: Contract) -> str | None:
    """Compare as `first_difference`, but for the episode limit: whoever runs episodes chooses that."""
    return first_difference(msgspec.structs.replace(policy, episode_limit=environment.episode_limit), environment)


def _show(value: object) -> str:
    if isinstance(value, tuple) and value and isinstance(value[0], Camera):
        return "[" + ", ".join(f"{c.name} {c.height}x{c.width} rot {c.rotation_deg}" for c in value) + "]"
    return repr(value)
