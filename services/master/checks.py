"""Is what a tenant asks for possible at all? One clear sentence if not.

In: specs. Out: nothing, or `JoyNexusError(INVALID)`. Never: a look at anything but the spec itself.
"""

from __future__ import annotations

import math

import msgspec

from joynexus.contract import Contract, Statistics, VectorStatistics
from joynexus.specs import (
    EvaluateDatasetSpec,
    EvaluateSpec,
    JobSpec,
    OptimizerSpec,
    PolicySpec,
    SftPolicy,
    SftSpec,
    check_name,
)
from joynexus.wire import ErrorCode, JoyNexusError
from joynexus.wire.hosted import OWN
from services.master.outbox import refuse

SIMULATOR_FAMILIES = ("metaworld", "maniskill", "libero", "gymnasium")
"""First parts of task names; a job for one of them waits until an env worker that serves it is there."""
MAX_CHUNK = 256
MAX_BATCH = 4096
MAX_STEPS = 10_000_000
MAX_EPISODES = 10_000
MAX_VIDEOS = 1_000
MAX_DIMENSION = 4096
MAX_CAMERAS = 16
MAX_SIDE = 4096
MAX_SPEC_BYTES = 384 * 1024
"""It travels to the trainer together with the samples of an op, in one message."""


def check_policy_name(name: str) -> None:
    """Refuse a name that cannot name a policy."""
    check_any_name("policy", name)


def check_any_name(kind: str, name: str) -> None:
    """Refuse a name that cannot name a thing of this kind."""
    try:
        check_name(kind, name)  # type: ignore[arg-type]  # callers pass the kinds that it lists
    except ValueError as error:
        raise refuse(ErrorCode.INVALID, str(error)) from error


def check_policy(spec: PolicySpec) -> None:
    """Refuse a policy spec that contradicts itself."""
    _check_recipe(spec)
    nbytes = len(msgspec.msgpack.encode(spec))
    if nbytes > MAX_SPEC_BYTES:
        raise _invalid(f"a policy's spec has at most {MAX_SPEC_BYTES} bytes encoded, this one has {nbytes}")
    contract = spec.contract
    check_contract(contract)
    if spec.statistics is None:
        if spec.normalization != "none":
            raise _invalid(
                f"normalization '{spec.normalization}' needs statistics: give the data set's, "
                "or set normalization to 'none'"
            )
    else:
        check_statistics(spec.statistics, contract)


def check_contract(contract: Contract) -> None:
    """Refuse a contract with numbers out of range, or larger than a policy's spec may be."""
    nbytes = len(msgspec.msgpack.encode(contract))
    if nbytes > MAX_SPEC_BYTES:
        raise _invalid(f"a contract has at most {MAX_SPEC_BYTES} bytes encoded, this one has {nbytes}")
    _range("state_dim", contract.state_dim, 0, MAX_DIMENSION)
    _range("action_dim", contract.action_dim, 1, MAX_DIMENSION)
    _range("number of cameras", len(contract.cameras), 0, MAX_CAMERAS)
    for camera in contract.cameras:
        _range(f"height of camera '{camera.name}'", camera.height, 1, MAX_SIDE)
        _range(f"width of camera '{camera.name}'", camera.width, 1, MAX_SIDE)
    for field, values in (
        ("rate_hz", (contract.rate_hz,)),
        ("action_low", contract.action_low),
        ("action_high", contract.action_high),
    ):
        if not all(map(math.isfinite, values)):
            raise _invalid(f"the contract's {field} is not finite: leave it out if there is none")


def check_job(spec: JobSpec) -> None:
    """Refuse a job spec with a value out of range."""
    check_policy_name(spec.policy)
    match spec:
        case SftSpec():
            check_any_name("data set", spec.dataset)
            _range("steps", spec.steps, 1, MAX_STEPS)
            _range("batch_size", spec.batch_size, 1, MAX_BATCH)
            _range("checkpoint_every", spec.checkpoint_every, 1, MAX_STEPS)
            _range("holdout_episodes", spec.holdout_episodes, 0, MAX_EPISODES)
            _range("seed", spec.seed, 0, 2**63 - 1)
            _check_recipe(spec.create)
        case EvaluateSpec():
            _range("version", spec.version, 0, 2**31)
            _range("episodes", spec.episodes, 1, MAX_EPISODES)
            _range("first_seed", spec.first_seed, 0, 2**31 - 1 - MAX_EPISODES)
            _range("episode_limit", spec.episode_limit, 0, MAX_STEPS)
            _range("execute", spec.execute, 0, MAX_CHUNK)
            _range("videos", spec.videos, 0, min(spec.episodes, MAX_VIDEOS))
            for env in spec.tasks:
                _check_env(env)
        case EvaluateDatasetSpec():
            check_any_name("data set", spec.dataset)
            _range("version", spec.version, 0, 2**31)
            _range("number of episodes", len(spec.episodes), 1, MAX_EPISODES)
            if min(spec.episodes) < 0 or len(set(spec.episodes)) < len(spec.episodes):
                raise _invalid("episodes must be different non-negative numbers")


def _check_env(env: str) -> None:
    family, _, task = env.partition("/")
    if not family or not task or len(env) > 200:
        raise _invalid(f"env '{env[:80]}' is not a simulator task: write <family>/<task>")
    if family == OWN:
        check_any_name("task", task)
        return
    if family not in SIMULATOR_FAMILIES:
        known = ", ".join((*SIMULATOR_FAMILIES, OWN))
        raise _invalid(f"there is no simulator family '{family[:80]}': use one of {known}")


def recipe_difference(policy: PolicySpec, recipe: SftPolicy) -> str | None:
    """Compare a policy with how a job would create it; return the first field that differs, as a clause."""
    for field in SftPolicy.__struct_fields__:
        mine, theirs = getattr(policy, field), getattr(recipe, field)
        if mine != theirs:
            return f"its '{field}' is {mine!r}, the job's 'create' says {theirs!r}"
    return None


def _check_recipe(spec: PolicySpec | SftPolicy) -> None:
    if not spec.backbone or len(spec.backbone) > 200:
        raise _invalid("backbone must name a backbone of the cluster")
    if not spec.head or len(spec.head) > 64:
        raise _invalid("head must name an action module, e.g. 'oft'")
    for field, values in (("head_config", spec.head_config), ("adapter_config", spec.adapter_config)):
        for key, value in values.items():
            if isinstance(value, float) and not math.isfinite(value):  # it would not survive the JSON of a version
                raise _invalid(f"{field} has {value} for '{key[:80]}': give a finite number")
    _range("chunk", spec.chunk, 1, MAX_CHUNK)
    _range("seed", spec.seed, 0, 2**63 - 1)
    _check_optimizer(spec.optimizer)


def _check_optimizer(spec: OptimizerSpec) -> None:
    if not 0 < spec.lr <= 1e3:  # also refuses NaN
        raise _invalid(f"lr must lie above 0 and be at most 1000, not {spec.lr:g}")
    for beta in spec.betas:
        if not 0 <= beta < 1:
            raise _invalid(f"betas must lie in [0, 1), not {spec.betas}")
    if not 0 < spec.eps < 1:
        raise _invalid(f"eps must lie between 0 and 1, not {spec.eps}")
    _number("weight_decay", spec.weight_decay, 0.0, 1e3)
    _number("grad_clip", spec.grad_clip, 0.0, 1e9)
    _range("warmup_steps", spec.warmup_steps, 0, MAX_STEPS)
    _range("decay_steps", spec.decay_steps, 0, MAX_STEPS)
    _number("final_lr_fraction", spec.final_lr_fraction, 0.0, 1.0)


def check_statistics(statistics: Statistics, contract: Contract) -> None:
    """Refuse statistics that do not fit their contract, or are not finite."""
    for name, vector, length in (
        ("state", statistics.state, contract.state_dim),
        ("action", statistics.action, contract.action_dim),
    ):
        for field in VectorStatistics.__struct_fields__:
            values: tuple[float, ...] = getattr(vector, field)
            if len(values) != length:
                raise _invalid(
                    f"statistics of {name} have {len(values)} values of '{field}', "
                    f"but the contract's {name}_dim is {length}"
                )
            if not all(map(math.isfinite, values)):
                raise _invalid(f"statistics of {name} have a value of '{field}' that is not finite")


def _range(field: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise _invalid(f"{field} must lie between {low} and {high}, not {value}")


def _number(field: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # also refuses NaN
        raise _invalid(f"{field} must lie between {low:g} and {high:g}, not {value}")


def _invalid(sentence: str) -> JoyNexusError:
    return refuse(ErrorCode.INVALID, sentence)
