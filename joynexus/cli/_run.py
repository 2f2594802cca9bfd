"""`joynexus run | sft | rl | evaluate`: jobs from a spec file, or from options.

In: YAML or options. Out: a job, watched until it ends. Never: a default of its own; what is not given is the spec's.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from joynexus.cli._common import Config, Json, client, module_config
from joynexus.cli._results import describe_job, first_difference

if TYPE_CHECKING:
    from collections.abc import Mapping

    from joynexus.client import Job
    from joynexus.specs import EvaluateSpec, JobSpec
    from joynexus.wire.front import JobInfo

SpecFile = Annotated[Path | None, typer.Argument(help="Job spec (YAML); otherwise give the options.")]
Detach = Annotated[bool, typer.Option("--detach", help="Print the job's id and do not wait.")]
PolicyName = Annotated[str, typer.Option(help="Name of the policy.")]


def add_to(app: typer.Typer) -> None:
    """Add these commands."""
    app.command("run")(run_spec)
    for command in (sft, rl, evaluate):
        app.command()(command)


def run_spec(
    spec: Annotated[Path, typer.Argument(help="Job spec (YAML) of any kind: sft, rl, evaluate, pipeline, …")],
    video_dir: Annotated[Path | None, typer.Option(help="Save recorded episodes here.")] = None,
    detach: Detach = False,
    config: Config = None,
    json: Json = False,
) -> None:
    """Run a job, or a pipeline of jobs, from a spec file."""
    _run(_read_spec(spec, object, False), config, detach, json, video_dir=video_dir)


def sft(
    spec: SpecFile = None,
    policy: PolicyName = "",
    dataset: Annotated[str, typer.Option(help="Name of the data set.")] = "",
    steps: Annotated[int | None, typer.Option(help="Optimizer steps.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Samples a step.")] = None,
    backbone: Annotated[str | None, typer.Option(help="Backbone of a new policy.")] = None,
    head: Annotated[str | None, typer.Option(help="Its action module: oft, groot, or an installed one.")] = None,
    head_config: Annotated[list[str] | None, typer.Option(help="One of its sizes, key=value, e.g. size=small.")] = None,
    adapter: Annotated[str | None, typer.Option(help="Module before it: none or bottleneck.")] = None,
    adapter_config: Annotated[list[str] | None, typer.Option(help="One of the adapter's sizes, key=value.")] = None,
    chunk: Annotated[int | None, typer.Option(help="Actions predicted at once, of a new policy.")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate of a new policy.")] = None,
    holdout_episodes: Annotated[int | None, typer.Option(help="Episodes at the end that are not trained on.")] = None,
    publish_initial: Annotated[bool, typer.Option(help="Publish the untrained policy first.")] = False,
    seed: Annotated[int | None, typer.Option(help="Seeds weights and order of samples.")] = None,
    detach: Detach = False,
    config: Config = None,
    json: Json = False,
) -> None:
    """Train a policy on a data set and publish it."""
    from joynexus.specs import OptimizerSpec, SftPolicy, SftSpec

    job: JobSpec
    if spec is not None:
        others = (steps, batch_size, backbone, head, adapter, chunk, lr, holdout_episodes, seed)
        given = bool(policy or dataset or publish_initial or head_config or adapter_config)
        job = _read_spec(spec, SftSpec, given or any(other is not None for other in others))
    else:
        _need({"--policy": policy, "--dataset": dataset}, "sft")
        create = SftPolicy(
            **_given(
                backbone=backbone,
                head=head,
                head_config=module_config(head_config or (), "--head-config"),
                adapter=adapter,
                adapter_config=module_config(adapter_config or (), "--adapter-config"),
                chunk=chunk,
                optimizer=None if lr is None else OptimizerSpec(lr=lr),
                seed=seed,
            )
        )
        job = SftSpec(
            policy=policy,
            dataset=dataset,
            create=create,
            publish_initial=publish_initial,
            **_given(steps=steps, batch_size=batch_size, holdout_episodes=holdout_episodes, seed=seed),
        )
    _run(job, config, detach, json)


def rl(
    spec: SpecFile = None,
    policy: PolicyName = "",
    env: Annotated[str, typer.Option(help="Simulator task, e.g. metaworld/reach-v3.")] = "",
    algorithm: Annotated[str, typer.Option(help="ppo or grpo, with its defaults; a spec file can set all.")] = "ppo",
    updates: Annotated[int | None, typer.Option(help="How often the policy is improved.")] = None,
    episodes: Annotated[int | None, typer.Option(help="Episodes for each update.")] = None,
    reward: Annotated[str | None, typer.Option(help="dense or success.")] = None,
    episode_limit: Annotated[int | None, typer.Option(help="Steps after which an episode ends.")] = None,
    max_staleness: Annotated[int | None, typer.Option(help="Updates an episode may lag; 0: synchronous.")] = None,
    stop_at: Annotated[float | None, typer.Option(help="End early at this rate of success.")] = None,
    chunk: Annotated[int | None, typer.Option(help="Actions predicted at once, of a new policy.")] = None,
    head: Annotated[str | None, typer.Option(help="Action module of a new policy.")] = None,
    backbone: Annotated[str | None, typer.Option(help="Backbone of a new policy.")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate of this job.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seeds weights, draws and order of samples.")] = None,
    detach: Detach = False,
    config: Config = None,
    json: Json = False,
) -> None:
    """Improve a policy by letting it act in a simulator."""
    from joynexus.specs import GrpoSpec, OptimizerSpec, PpoSpec, RlPolicy, RlSpec

    job: JobSpec
    if spec is not None:
        others = (updates, episodes, reward, episode_limit, max_staleness, stop_at, chunk, head, backbone, lr, seed)
        given = bool(policy or env or algorithm != "ppo") or any(other is not None for other in others)
        job = _read_spec(spec, RlSpec, given)
    else:
        _need({"--policy": policy, "--env": env}, "rl")
        algorithms = {"ppo": PpoSpec, "grpo": GrpoSpec}
        if algorithm not in algorithms:
            raise ValueError(f"there is no algorithm '{algorithm}': use ppo or grpo")
        if reward not in (None, "dense", "success"):
            raise ValueError(f"there is no reward '{reward}': use dense or success")
        job = RlSpec(
            policy=policy,
            env=env,
            algorithm=algorithms[algorithm](),
            create=RlPolicy(**_given(chunk=chunk, head=head, backbone=backbone, seed=seed)),
            **_given(
                updates=updates,
                episodes=episodes,
                reward=reward,
                episode_limit=episode_limit,
                max_staleness=max_staleness,
                stop_at=stop_at,
                optimizer=None if lr is None else OptimizerSpec(lr=lr),
                seed=seed,
            ),
        )
    _run(job, config, detach, json)


def evaluate(
    spec: SpecFile = None,
    policy: PolicyName = "",
    env: Annotated[list[str] | None, typer.Option(help="Simulator task; give it again for several.")] = None,
    dataset: Annotated[str, typer.Option(help="Or a data set: compare with recorded actions.")] = "",
    episodes: Annotated[str, typer.Option(help="Number of episodes; for a data set, their indices: 3,4.")] = "",
    version: Annotated[int, typer.Option(help="Version; 0: the newest.")] = 0,
    first_seed: Annotated[int, typer.Option(help="Seeds count from here.")] = 0,
    episode_limit: Annotated[int, typer.Option(help="Steps after which an episode fails; 0: the task's own.")] = 0,
    videos: Annotated[int, typer.Option(help="Episodes of each task to record as MP4.")] = 0,
    video_dir: Annotated[Path | None, typer.Option(help="Save recorded episodes here.")] = None,
    repeat: Annotated[int, typer.Option(min=1, help="Do it so often, and prove that the table is the same.")] = 1,
    detach: Detach = False,
    config: Config = None,
    json: Json = False,
) -> None:
    """Measure a published version: success in a simulator, or action error on recorded episodes."""
    from joynexus.specs import EvaluateDatasetSpec, EvaluateSpec

    job: JobSpec
    if spec is not None:
        given = bool(policy or env or dataset or episodes or version or first_seed or episode_limit or videos)
        job = _read_spec(spec, (EvaluateSpec, EvaluateDatasetSpec), given)
    elif dataset:
        _need({"--policy": policy, "--episodes": episodes}, "evaluate")
        indices = tuple(_number(part) for part in episodes.split(","))
        job = EvaluateDatasetSpec(policy=policy, version=version, dataset=dataset, episodes=indices)
    else:
        tasks = tuple(env or ())
        _need({"--policy": policy, "--env (or --dataset)": "".join(tasks)}, "evaluate")
        job = EvaluateSpec(
            policy=policy,
            version=version,
            env=tasks[0] if len(tasks) == 1 else tasks,
            episodes=_number(episodes or "50"),
            first_seed=first_seed,
            episode_limit=episode_limit,
            videos=videos,
        )
    if repeat > 1:
        if detach or video_dir is not None or not isinstance(job, EvaluateSpec):
            raise ValueError(
                "--repeat compares evaluations in a simulator, and waits for them: leave --detach and --video-dir out"
            )
        _repeat(job, repeat, config, json)
        return
    _run(job, config, detach, json, video_dir=video_dir)


def _run(job: JobSpec, config: Path | None, detach: bool, json: bool, *, video_dir: Path | None = None) -> None:
    with client(config) as connected:
        running = connected.submit(job)
        if detach:
            typer.echo(running.id)
            return
        typer.echo(f"job {running.id}; it goes on if you leave", err=True)
        info = running.wait()
        if video_dir is not None:
            _save_videos(running, video_dir)
    describe_job(info, json)


def _save_videos(job: Job, folder: Path) -> None:
    for path in job.save_videos(folder):
        typer.echo(f"wrote {path}", err=True)


def _repeat(job: EvaluateSpec, times: int, config: Path | None, json: bool) -> None:
    """Evaluate several times; a difference is an error, in one sentence."""
    import msgspec

    first: JobInfo | None = None
    with client(config) as connected:
        for number in range(1, times + 1):
            running = connected.submit(job)
            typer.echo(f"job {running.id}: evaluation {number} of {times}", err=True)
            info = running.wait()
            if first is None or first.evaluation is None:
                first = info
                job = msgspec.structs.replace(job, version=info.version)  # a newer one may be published meanwhile
                describe_job(info, json)
                continue
            difference = None if info.evaluation is None else first_difference(first.evaluation, info.evaluation)
            if info.evaluation is None or difference is not None:
                raise ValueError(f"evaluation {number} differs from the first: {difference or 'it has no result'}")
    if not json:
        typer.echo(f"{times} evaluations, the same table each time")


def _read_spec(path: Path, kind: type[Any] | tuple[type[Any], ...], options: bool) -> JobSpec:
    from joynexus.specs import load_job

    if options:
        raise ValueError("give either a spec file or options that say what to do, not both: put them into the file")
    try:
        text = path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text file: a job spec is YAML, as in examples/jobs") from error
    spec: JobSpec = load_job(text)
    if not isinstance(spec, kind):
        raise ValueError(f"{path} is a spec of another kind of job: its `kind` is wrong for this command")
    return spec  # type: ignore[no-any-return]  # narrowed to Any by a kind that is a parameter


def _need(options: Mapping[str, str], command: str) -> None:
    missing = [name for name, value in options.items() if not value]
    if missing:
        raise ValueError(f"joynexus {command} needs a spec file, or {' and '.join(missing)}")


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _number(text: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise ValueError(f"'{text}' is no number of episodes") from error
