"""Is what a tenant asks for possible at all? One clear sentence if not.

In: specs. Out: nothing, or `JoyNexusError(INVALID)`. Never: a look at anything but the spec itself.
"""

from __future__ import annotations

import math

import msgspec

from joynexus.contract import Camera, Contract, Statistics, VectorStatistics
from joynexus.specs import (
    MAX_CRITIC_WIDTH,
    MAX_DECISIONS,
    Algorithm,
    EvaluateDatasetSpec,
    EvaluateSpec,
    GrpoSpec,
    JobSpec,
    OptimizerSpec,
    PipelineSpec,
    PolicySpec,
    PpoSpec,
    RlPolicy,
    RlSpec,
    SftPolicy,
    SftSpec,
    check_name,
)
from joynexus.wire import ErrorCode, JoyNexusError, limits
from joynexus.wire.hosted import OWN
from services.master.outbox import refuse

Recipe = SftPolicy | RlPolicy
"""How a job creates its policy."""
SIMULATOR_FAMILIES = ("metaworld", "maniskill", "libero", "gymnasium")
"""First parts of task names; a job for one of them waits until an env worker that serves it is there."""
MAX_CHUNK = 256
MAX_BATCH = 4096
MAX_STEPS = 10_000_000
MAX_UPDATES = 10_000
MAX_UPDATE_EPISODES = 4096
MAX_WARMUP_EPISODES = 1000
MAX_STALENESS = 64
MAX_EPOCHS = 100
MAX_MINIBATCH = 65_536
MAX_STAGES = 32
MAX_TASKS = 200
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


def check_execute(execute: int, chunk: int, policy: str) -> None:
    """Refuse to execute more actions than a chunk of the policy has."""
    if execute > chunk:
        raise _invalid(f"execute is {execute}, but policy '{policy}' predicts chunks of {chunk}")


def check_decisions(spec: RlSpec, chunk: int, limit: int) -> None:
    """Refuse updates that may have more decisions than are trained on at once.

    Args:
        chunk: actions that the policy predicts at once.
        limit: steps after which an episode ends; 0 if that is not known yet.
    """
    executed = spec.execute or chunk
    each = -(-limit // executed)
    if spec.episodes * each <= MAX_DECISIONS:
        return
    group = spec.algorithm.group_size if isinstance(spec.algorithm, GrpoSpec) else 1
    fitting = MAX_DECISIONS // each // group * group
    fewer = f"at most {fitting} episodes, " if fitting else ""
    raise _invalid(
        f"an update of {spec.episodes} episodes of up to {limit} steps, with a decision every {executed}, has up to "
        f"{spec.episodes * each} decisions, but is trained on at most {MAX_DECISIONS}: use {fewer}a smaller "
        "episode_limit, or execute more of each chunk"
    )


def check_contract(contract: Contract) -> None:
    """Refuse a contract with numbers out of range, or larger than a policy's spec may be."""
    nbytes = len(msgspec.msgpack.encode(contract))
    if nbytes > MAX_SPEC_BYTES:
        raise _invalid(f"a contract has at most {MAX_SPEC_BYTES} bytes encoded, this one has {nbytes}")
    _range("state_dim", contract.state_dim, 0, MAX_DIMENSION)
    _range("action_dim", contract.action_dim, 1, MAX_DIMENSION)
    _check_cameras(contract.cameras)
    for field, values in (
        ("rate_hz", (contract.rate_hz,)),
        ("action_low", contract.action_low),
        ("action_high", contract.action_high),
    ):
        if not all(map(math.isfinite, values)):
            raise _invalid(f"the contract's {field} is not finite: leave it out if there is none")
        if field != "rate_hz" and len(values) not in (0, contract.action_dim):
            raise _invalid(
                f"the contract's {field} has {len(values)} values, but its action_dim is {contract.action_dim}: give "
                "one for each dimension, or none"
            )


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
            _range("number of tasks", len(spec.tasks), 1, MAX_TASKS)
            _range("number of episodes of all tasks", spec.episodes * len(spec.tasks), 1, MAX_EPISODES)
            if len(set(spec.tasks)) < len(spec.tasks):
                raise _invalid("env names a task twice: name each once")
            for env in spec.tasks:
                _check_env(env)
                if spec.videos and env.partition("/")[0] == OWN:
                    raise _invalid(f"no videos are recorded in '{env}': leave 'videos' out, and record them there")
        case RlSpec():
            _check_rl(spec)
        case PipelineSpec():
            _range("number of stages", len(spec.stages), 1, MAX_STAGES)
            for number, stage in enumerate(spec.stages, 1):
                if stage.policy != spec.policy:
                    raise _invalid(
                        f"stage {number} is about policy '{stage.policy[:80]}', but the pipeline about "
                        f"'{spec.policy}': all stages of a pipeline are about one policy"
                    )
                check_job(stage)
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


def _check_rl(spec: RlSpec) -> None:
    _check_env(spec.env)
    _range("updates", spec.updates, 1, MAX_UPDATES)
    _range("episodes", spec.episodes, 1, MAX_UPDATE_EPISODES)
    _number("reward_scale", abs(spec.reward_scale), 1e-9, 1e9)
    _range("episode_limit", spec.episode_limit, 0, MAX_STEPS)
    _range("execute", spec.execute, 0, MAX_CHUNK)
    _range("max_staleness", spec.max_staleness, 0, MAX_STALENESS)
    _number("weight_limit", spec.weight_limit, 0.01, 1e6)
    _number("stop_at", spec.stop_at, 0.0, 1.0)
    _range("warmup_episodes", spec.warmup_episodes, 1, MAX_WARMUP_EPISODES)
    _range("checkpoint_every", spec.checkpoint_every, 1, MAX_UPDATES)
    _range("first_seed", spec.first_seed, 0, 2**31 - 1 - spec.updates * spec.episodes)
    _range("seed", spec.seed, 0, 2**63 - 1)
    if spec.optimizer is not None:
        _check_optimizer(spec.optimizer)
    exploration = spec.exploration
    for field in ("std", "noise_level", "noise_low", "noise_high"):
        _number(field, getattr(exploration, field), 1e-6, 10.0)
    if exploration.noise_low > exploration.noise_high:
        raise _invalid(f"noise_low is {exploration.noise_low:g}, above noise_high, {exploration.noise_high:g}")
    _check_algorithm(spec.algorithm)
    if isinstance(spec.algorithm, GrpoSpec) and spec.episodes % spec.algorithm.group_size:
        size = spec.algorithm.group_size
        raise _invalid(f"episodes must be a multiple of group_size, {size}: use {-(-spec.episodes // size) * size}")
    _check_recipe(spec.create)
    _check_cameras(spec.create.cameras)


def _check_algorithm(spec: Algorithm) -> None:
    _range("epochs", spec.epochs, 1, MAX_EPOCHS)
    _range("minibatch", spec.minibatch, 1, MAX_MINIBATCH)
    _number("clip_low", spec.clip_low, 1e-6, 1.0)
    _number("clip_high", spec.clip_high, 1e-6, 100.0)
    if spec.dual_clip != 0:
        _number("dual_clip (0 turns it off)", spec.dual_clip, 1.0, 1e6)
    _number("entropy_weight", spec.entropy_weight, 0.0, 1e3)
    _number("target_kl", spec.target_kl, 0.0, 1e3)
    match spec:
        case PpoSpec():
            _number("gamma", spec.gamma, 0.0, 1.0)
            _number("lam", spec.lam, 0.0, 1.0)
            _number("value_clip", spec.value_clip, 0.0, 1e6)
            _number("value_weight", spec.value_weight, 0.0, 1e3)
            _range("critic's width", spec.critic.width, 1, MAX_CRITIC_WIDTH)
            _number("critic's lr", spec.critic.lr, 0.0, 1e3)
        case GrpoSpec():
            _range("group_size", spec.group_size, 2, limits.MAX_ACT_ROWS)
            for field in ("filter_low", "filter_high"):
                if math.isnan(getattr(spec, field)):
                    raise _invalid(f"{field} must be a number")
            if spec.filter_low > spec.filter_high:
                raise _invalid(f"filter_low is {spec.filter_low:g}, above filter_high, {spec.filter_high:g}")


def _check_cameras(cameras: tuple[Camera, ...]) -> None:
    _range("number of cameras", len(cameras), 0, MAX_CAMERAS)
    if len({camera.name for camera in cameras}) < len(cameras):
        raise _invalid("cameras must have different names")
    for camera in cameras:
        _range(f"height of camera '{camera.name}'", camera.height, 1, MAX_SIDE)
        _range(f"width of camera '{camera.name}'", camera.width, 1, MAX_SIDE)


def says_nothing(recipe: Recipe) -> bool:
    """Tell whether a job leaves to others how its policy is made."""
    return recipe == type(recipe)()


def recipe_difference(policy: PolicySpec | Recipe, recipe: Recipe) -> str | None:
    """Compare a policy, or how it will be made, with a job's `create`; a `create` that says nothing fits any.

    Returns:
        The first field that differs, as a clause.
    """
    if says_nothing(recipe):
        return None
    for field in type(recipe).__struct_fields__:
        theirs = getattr(recipe, field)
        mine = _value(policy, field, theirs)
        if mine != theirs:
            return f"its '{field}' is {mine!r}, the job's 'create' says {theirs!r}"
    return None


def _value(policy: PolicySpec | Recipe, field: str, unknown: object) -> object:
    if field == "cameras" and isinstance(policy, PolicySpec):
        return policy.contract.cameras
    if field == "action_target" and isinstance(policy, RlPolicy):
        return "absolute"
    return getattr(policy, field, unknown)  # of `SftPolicy`, its data set has the cameras


def _check_recipe(spec: PolicySpec | Recipe) -> None:
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
