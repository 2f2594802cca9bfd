"""What a tenant asks for: policies and jobs, typed, the same fields in YAML and in Python.

In: YAML text or keyword arguments. Out: frozen structs that go over the wire as they are. Never: a default that hides
a misspelt field: unknown fields are refused by name (`load_job`).
"""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from joynexus.contract import Contract, NormalizationMode, Statistics

ActionTarget = Literal["absolute", "relative_to_state"]
ModuleConfig = dict[str, int | float | str | bool]

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

    backbone: str
    head: str = "oft"
    head_config: ModuleConfig = {}
    adapter: str = "none"
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

    backbone: str = "lite"
    head: str = "oft"
    head_config: ModuleConfig = {}
    adapter: str = "none"
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

    policy: str
    dataset: str
    steps: int = 1000
    batch_size: int = 64
    create: SftPolicy = SftPolicy()
    holdout_episodes: int = 0
    checkpoint_every: int = 200
    publish: bool = True
    publish_initial: bool = False
    seed: int = 0


class EvaluateSpec(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="evaluate", tag_field="kind"
):
    """Evaluation of one version in a simulator, on fixed seeds, read-only.

    Attributes:
        policy: name of the policy.
        version: version to evaluate; 0 means the newest when the job is accepted.
        env: simulator task, e.g. `metaworld/reach-v3`.
        episodes: number of episodes, on seeds `first_seed … first_seed + episodes - 1`.
        first_seed: first seed.
        episode_limit: steps after which an episode fails; 0 takes the simulator's own.
        execute: actions of each chunk that are executed before the policy is asked again; 0 means all of them.
        videos: how many episodes are recorded as MP4.
    """

    policy: str
    version: int = 0
    env: str
    episodes: int = 50
    first_seed: int = 0
    episode_limit: int = 0
    execute: int = 0
    videos: int = 0


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

    policy: str
    version: int = 0
    dataset: str
    episodes: tuple[int, ...]


JobSpec = SftSpec | EvaluateSpec | EvaluateDatasetSpec


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
        spec: JobSpec = msgspec.convert(content, type=JobSpec)
    except msgspec.MsgspecError as error:
        hint = "; YAML takes 1e-3 for a text: write 0.001 or 1.0e-3" if "`float`, got `str`" in str(error) else ""
        raise ValueError(f"the job spec is not valid: {' '.join(str(error).split())}{hint}") from error
    return spec


def check_name(kind: Literal["policy", "data set", "tenant", "key", "state"], name: str) -> str:
    """Return `name` if it may name a thing of this kind.

    Raises:
        ValueError: if it has characters that names may not have, or is too long.
    """
    if not NAME_PATTERN.fullmatch(name):
        raise ValueError(
            f"'{name[:80]}' cannot name a {kind}: use 1 to 64 of a-z, 0-9, '-' and '_', starting with a letter or digit"
        )
    return name
