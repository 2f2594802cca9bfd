"""What a tenant asks for: policies and jobs, typed, the same fields in YAML and in Python.

In: YAML text or keyword arguments. Out: frozen structs that go over the wire as they are. Never: a default that hides
a misspelt field: unknown fields are refused by name (`load_job`).
"""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from joynexus.bounds import Few, Many, Short, Table
from joynexus.contract import Camera, Contract, NormalizationMode, Statistics

ActionTarget = Literal["absolute", "relative_to_state"]
ModuleConfig = Table[int | float | Short | bool]

NAME_PATTERN = re.compile(r"^[a-z0-9][a-z0-9_-]{0,63}$")


class OptimizerSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """AdamW with optional linear warm-up, cosine decay and gradient clipping.

    Attributes:
        lr: peak learning rate.
        betas, eps, weight_decay: AdamW's own.
        grad_clip: largest global L2 norm of the gradient; 0 turns clipping off.
        warmup_steps: optimizer steps of linear warm-up from 0.
        decay_steps: optimizer steps after which cosine decay ends; 0 keeps the rate constant after warm-up.
        final_lr_fraction: rate at the end of the decay, as a fraction of `lr`.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 1e-4
    grad_clip: float = 1.0
    warmup_steps: int = 0
    decay_steps: int = 0
    final_lr_fraction: float = 0.1


class PolicySpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything a trainer or an inference service needs to build a policy.

    Attributes:
        backbone: name (`lite`, `tiny-qwen3vl`), hub name or directory known to the cluster.
        head: name of the action module (`oft`, `groot`, or one that the operator installed).
        head_config: the module's own sizes, e.g. `{"width": 256}`; unknown keys are refused by the module.
        adapter: private module between feature and head: `none` or `bottleneck`.
        adapter_config: the adapter's own sizes, e.g. `{"width": 64}`.
        chunk: actions predicted at once.
        contract: embodiment contract.
        statistics: normalisation statistics; None only with `normalization="none"`.
        normalization: how state and action are scaled.
        action_target: what the head predicts: the action, or how far it is from the current state. The second needs
            states and actions of the same kind (joint positions, say) and helps where data is scarce.
        optimizer: the policy's optimizer.
        seed: seeds initial weights and everything that is drawn while training.
    """

    backbone: Short
    head: Short = "oft"
    head_config: ModuleConfig = {}
    adapter: Short = "none"
    adapter_config: ModuleConfig = {}
    chunk: int = 8
    contract: Contract
    statistics: Statistics | None = None
    normalization: NormalizationMode = "mean_std"
    action_target: ActionTarget = "absolute"
    optimizer: OptimizerSpec = OptimizerSpec()
    seed: int = 0


class SftPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The part of a policy an SFT job may choose; contract and statistics come from the data set."""

    backbone: Short = "lite"
    head: Short = "oft"
    head_config: ModuleConfig = {}
    adapter: Short = "none"
    adapter_config: ModuleConfig = {}
    chunk: int = 8
    normalization: NormalizationMode = "mean_std"
    action_target: ActionTarget = "absolute"
    optimizer: OptimizerSpec = OptimizerSpec()
    seed: int = 0


class SftSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="sft", tag_field="kind"):
    """Supervised fine-tuning of one policy on one data set.

    Attributes:
        policy: name of the policy; created from `create` if it does not exist.
        dataset: name of a data set that was pushed or that the operator mounted.
        steps: optimizer steps.
        batch_size: samples per step.
        create: how to create the policy.
        holdout_episodes: episodes at the end of the set that are never trained on.
        checkpoint_every: optimizer steps between checkpoints.
        publish: publish a version when the job ends.
        publish_initial: publish the untrained policy first, if the policy has no version yet.
        seed: seeds the order of samples.
    """

    policy: Short
    dataset: Short
    steps: int = 1000
    batch_size: int = 64
    create: SftPolicy = SftPolicy()
    holdout_episodes: int = 0
    checkpoint_every: int = 200
    publish: bool = True
    publish_initial: bool = False
    seed: int = 0


class RlPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The part of a policy an RL job may choose if it creates it; contract and statistics come from the simulator.

    Attributes:
        cameras: pictures that the policy sees; empty for a policy that sees its instruction and state alone.
    """

    backbone: Short = "lite"
    head: Short = "oft"
    head_config: ModuleConfig = {}
    adapter: Short = "none"
    adapter_config: ModuleConfig = {}
    chunk: int = 1
    cameras: Few[Camera] = ()
    normalization: NormalizationMode = "mean_std"
    optimizer: OptimizerSpec = OptimizerSpec()
    seed: int = 0


class ExplorationSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a policy draws its actions while it collects experience; numbers are in normalised actions.

    Attributes:
        std: heads that regress (`oft`): standard deviation of the Gaussian around their chunk, at first.
        learn_std: whether it is learned, one for each action dimension.
        flow: heads that integrate a flow (`groot`): `sde` turns one step of the integration, drawn anew for each chunk,
            into a stochastic one; `noise` adds learned noise to every step.
        noise_level: `sde`: the factor a in sigma(t) = a sqrt(t / (1 - t)).
        noise_low, noise_high: `noise`: between which the learned standard deviation lies.
    """

    std: float = 0.3
    learn_std: bool = True
    flow: Literal["sde", "noise"] = "sde"
    noise_level: float = 0.5
    noise_low: float = 0.08
    noise_high: float = 0.16


MAX_CRITIC_WIDTH = 1024


class CriticSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The value head: an MLP over the mean of the feature's tokens and the state.

    Attributes:
        width: of its two hidden layers, at most `MAX_CRITIC_WIDTH`.
        lr: its learning rate; 0 takes the policy's.
    """

    width: int = 128
    lr: float = 0.0


Level = Literal["action", "chunk"]
"""What counts as one step of the decision process: each action, or each chunk of actions."""


class PpoSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="ppo", tag_field="name"):
    """Proximal policy optimisation (Schulman et al., 2017) with a value head and generalised advantages.

    Attributes:
        level: `action`: rewards, values and log-probabilities for each action; `chunk`: summed over a chunk.
        gamma, lam: discount, and decay of generalised advantage estimation (Schulman et al., 2016).
        epochs: passes over the experience of an update.
        minibatch: chunks for each optimizer step.
        clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high].
        dual_clip: bound on the loss where the advantage is negative (Ye et al., 2020); 0 turns it off.
        value_clip: how far a value may move before its loss is clipped; 0 turns that off.
        value_weight, entropy_weight: weights of the value's loss and of the entropy bonus.
        target_kl: an epoch stops when the approximate KL divergence exceeds this; 0 never stops.
        critic: the value head.
    """

    level: Level = "action"
    gamma: float = 0.99
    lam: float = 0.95
    epochs: int = 5
    minibatch: int = 512
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float = 3.0
    value_clip: float = 0.0
    value_weight: float = 0.5
    entropy_weight: float = 0.0
    target_kl: float = 0.0
    critic: CriticSpec = CriticSpec()


class GrpoSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="grpo", tag_field="name"):
    """Group relative policy optimisation (Shao et al., 2024): an episode is measured against those of the same start.

    Attributes:
        group_size: episodes from the same start, an advantage group.
        level: as in `PpoSpec`; rewards count for the episode as a whole.
        epochs, minibatch, clip_low, clip_high, dual_clip, entropy_weight, target_kl: as in `PpoSpec`.
        filter_low, filter_high: groups whose mean return lies outside are left out: they say little.
        by_length: weigh each step by one over the length of its episode, so that all episodes weigh the same.
    """

    group_size: int = 8
    level: Level = "action"
    epochs: int = 3
    minibatch: int = 512
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float = 3.0
    entropy_weight: float = 0.0
    target_kl: float = 0.0
    filter_low: float = 0.1
    filter_high: float = 0.9
    by_length: bool = True


Algorithm = PpoSpec | GrpoSpec

MAX_DECISIONS = 65_536
"""Decisions (chunks that a policy was asked for) that one update is trained on, at most."""


class RlSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="rl", tag_field="kind"):
    """Reinforcement learning of one policy in a simulator.

    Attributes:
        policy: name of the policy; created from `create` if it does not exist.
        env: simulator task, e.g. `metaworld/reach-v3`.
        algorithm: `{name: ppo, …}` or `{name: grpo, …}`.
        updates: how often the policy is improved; each update takes `episodes` new episodes and publishes a version.
        episodes: episodes for each update, of at most `MAX_DECISIONS` decisions; for GRPO a multiple of `group_size`.
        reward: `dense` is the simulator's own, and episodes run to their limit; `success` is 1 for the step that solves
            the task, which ends the episode.
        reward_scale: factor on the rewards that are trained on.
        episode_limit: steps after which an episode ends; 0 takes the simulator's own.
        execute: actions of each chunk that are executed before the policy is asked again; 0 means all of them.
        exploration: how actions are drawn.
        optimizer: for this job; None takes the policy's own.
        max_staleness: updates that may lie between the version that acts and the one that is trained; 0 is synchronous:
            episodes and training take turns.
        weight_limit: asynchronous: samples whose importance weight would be larger count this much at most.
        stop_at: end early once the episodes of an update succeed this often; 0 does all updates.
        create: how to create the policy.
        warmup_episodes: episodes with random actions from which a created policy's statistics come.
        checkpoint_every: updates between checkpoints.
        first_seed: episodes start from the seeds `first_seed …`, so that evaluations can keep others for themselves.
        seed: seeds what is drawn, and the order of samples.
    """

    policy: Short
    env: Short
    algorithm: Algorithm = PpoSpec()
    updates: int = 100
    episodes: int = 32
    reward: Literal["dense", "success"] = "dense"
    reward_scale: float = 1.0
    episode_limit: int = 0
    execute: int = 0
    exploration: ExplorationSpec = ExplorationSpec()
    optimizer: OptimizerSpec | None = None
    max_staleness: int = 0
    weight_limit: float = 2.0
    stop_at: float = 0.0
    create: RlPolicy = RlPolicy()
    warmup_episodes: int = 8
    checkpoint_every: int = 10
    first_seed: int = 1_000_000
    seed: int = 0


class EvaluateSpec(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="evaluate", tag_field="kind"
):
    """Evaluation of one version in simulators, on fixed seeds, read-only.

    Attributes:
        policy: name of the policy.
        version: version to evaluate; 0 means the newest when the job is accepted.
        env: simulator task, e.g. `metaworld/reach-v3`, or a list of tasks.
        episodes: number of episodes of each task, on seeds `first_seed … first_seed + episodes - 1`.
        first_seed: first seed.
        episode_limit: steps after which an episode fails; 0 takes the simulator's own.
        execute: actions of each chunk that are executed before the policy is asked again; 0 means all of them.
        videos: how many episodes of each task are recorded as MP4.
    """

    policy: Short
    version: int = 0
    env: Short | Few[Short]
    episodes: int = 50
    first_seed: int = 0
    episode_limit: int = 0
    execute: int = 0
    videos: int = 0

    @property
    def tasks(self) -> tuple[str, ...]:
        """The simulator tasks."""
        return (self.env,) if isinstance(self.env, str) else self.env


class EvaluateDatasetSpec(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="evaluate_dataset", tag_field="kind"
):
    """Action error of one version on episodes of a data set, beside two trivial policies.

    Attributes:
        policy: name of the policy.
        version: version to evaluate; 0 means the newest when the job is accepted.
        dataset: name of the data set.
        episodes: episode indices to evaluate on.
    """

    policy: Short
    version: int = 0
    dataset: Short
    episodes: Many[int]


StageSpec = SftSpec | RlSpec | EvaluateSpec | EvaluateDatasetSpec


class PipelineSpec(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="pipeline", tag_field="kind"
):
    """Jobs on one policy one after another: each begins when the one before it has succeeded.

    Attributes:
        policy: name of the policy; a stage in YAML that names none is about this one.
        stages: the jobs. An evaluation's version 0 means what a stage before it published last, else the newest when
            its turn comes.
    """

    policy: Short
    stages: Few[StageSpec]


JobSpec = StageSpec | PipelineSpec


def load_job(text: str) -> JobSpec:
    """Read a job spec from YAML.

    Raises:
        ValueError: one sentence that names the wrong field or value.
    """
    try:
        content = msgspec.yaml.decode(text)
        if not isinstance(content, dict):
            what = "empty" if content is None else f"a {type(content).__name__}"
            raise ValueError(f"the job spec is {what}: it must have lines `field: value`, first `kind: sft` or another")
        stages = content.get("stages")
        if content.get("kind") == "pipeline" and isinstance(stages, list):
            named = {"policy": content.get("policy")}
            content["stages"] = [{**named, **stage} if isinstance(stage, dict) else stage for stage in stages]
        spec: JobSpec = msgspec.convert(content, type=JobSpec)
    except msgspec.MsgspecError as error:
        hint = "; YAML takes 1e-3 for a text: write 0.001 or 1.0e-3" if "`float`, got `str`" in str(error) else ""
        raise ValueError(f"the job spec is not valid: {' '.join(str(error).split())}{hint}") from error
    return spec


def check_name(kind: Literal["policy", "data set", "tenant", "key", "state", "task"], name: str) -> str:
    """Return `name` if it may name a thing of this kind.

    Raises:
        ValueError: if it has characters that names may not have, or is too long.
    """
    if not NAME_PATTERN.fullmatch(name):
        raise ValueError(
            f"'{name[:80]}' cannot name a {kind}: use 1 to 64 of a-z, 0-9, '-' and '_', starting with a letter or digit"
        )
    return name
