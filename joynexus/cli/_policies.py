"""`joynexus sft | evaluate | policies | load-weights | act | export`: policies, trained and used."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from joynexus.cli._common import Config, Json, client, module_config, print_json, print_table
from joynexus.cli._jobs import describe_job

if TYPE_CHECKING:
    from collections.abc import Mapping

    from joynexus.client import Job
    from joynexus.specs import JobSpec

SpecFile = Annotated[Path | None, typer.Argument(help="Job spec (YAML); otherwise give the options.")]
Detach = Annotated[bool, typer.Option("--detach", help="Print the job's id and do not wait.")]
PolicyName = Annotated[str, typer.Option(help="Name of the policy.")]


def add_to(app: typer.Typer) -> None:
    """Add these commands."""
    for command in (sft, evaluate, policies, load_weights, act, export):
        app.command()(command)


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


def evaluate(
    spec: SpecFile = None,
    policy: PolicyName = "",
    env: Annotated[str, typer.Option(help="Simulator task, e.g. metaworld/reach-v3.")] = "",
    dataset: Annotated[str, typer.Option(help="Or a data set: compare with recorded actions.")] = "",
    episodes: Annotated[str, typer.Option(help="Number of episodes; for a data set, their indices: 3,4.")] = "",
    version: Annotated[int, typer.Option(help="Version; 0: the newest.")] = 0,
    first_seed: Annotated[int, typer.Option(help="Seeds count from here.")] = 0,
    videos: Annotated[int, typer.Option(help="Episodes to record as MP4.")] = 0,
    video_dir: Annotated[Path | None, typer.Option(help="Save recorded episodes here.")] = None,
    detach: Detach = False,
    config: Config = None,
    json: Json = False,
) -> None:
    """Measure a published version: success in a simulator, or action error on recorded episodes."""
    from joynexus.specs import EvaluateDatasetSpec, EvaluateSpec

    job: JobSpec
    if spec is not None:
        given = bool(policy or env or dataset or episodes or version or first_seed or videos)
        job = _read_spec(spec, (EvaluateSpec, EvaluateDatasetSpec), given)
    elif dataset:
        _need({"--policy": policy, "--episodes": episodes}, "evaluate")
        indices = tuple(_number(part) for part in episodes.split(","))
        job = EvaluateDatasetSpec(policy=policy, version=version, dataset=dataset, episodes=indices)
    else:
        _need({"--policy": policy, "--env (or --dataset)": env}, "evaluate")
        job = EvaluateSpec(
            policy=policy,
            version=version,
            env=env,
            episodes=_number(episodes or "50"),
            first_seed=first_seed,
            videos=videos,
        )
    _run(job, config, detach, json, video_dir=video_dir)


def policies(config: Config = None, json: Json = False) -> None:
    """List policies: what they are, how far, where they live."""
    with client(config) as connected:
        infos = connected.policies()
    if json:
        print_json(infos)
        return
    rows = [
        (i.policy, i.spec.head, i.spec.backbone, i.step, len(i.versions), i.driver or "-", i.home or "-",
         "yes" if i.resident else "no")
        for i in infos
    ]  # fmt: skip
    print_table(("policy", "head", "backbone", "step", "versions", "driver", "home", "in memory"), rows)


def load_weights(
    policy: Annotated[str, typer.Argument(help="Name of the policy.")],
    path: Annotated[Path, typer.Argument(help="A safetensors file, or the folder of an exported policy.")],
    config: Config = None,
) -> None:
    """Put own weights into a policy, as if it had been created with them; the optimizer starts anew."""
    with client(config) as connected, connected.policy(policy) as handle:
        handle.load_weights(path).result()
    typer.echo(f"policy '{policy}' goes on from {path}")


def act(
    policy: PolicyName,
    observation: Annotated[Path | None, typer.Option(help=".npz with state and one array a camera.")] = None,
    image: Annotated[list[Path] | None, typer.Option(help="A picture file a camera, in the contract's order.")] = None,
    state: Annotated[str, typer.Option(help="State as numbers: 0.1,0.2,…")] = "",
    instruction: Annotated[str, typer.Option(help="What is to be done.")] = "",
    version: Annotated[int, typer.Option(help="Version; 0: the newest.")] = 0,
    seed: Annotated[int, typer.Option(help="For heads that draw: the same seed draws the same.")] = 0,
    config: Config = None,
    json: Json = False,
) -> None:
    """Ask a published policy for one chunk of actions."""
    import numpy as np

    with client(config) as connected:
        handle = connected.policy(policy)
        cameras = [camera.name for camera in handle.spec.contract.cameras]
        arrays: dict[str, Any] = {}
        if observation is not None:
            arrays = _arrays(observation)
        if state:
            arrays["state"] = np.array([_float(part) for part in state.split(",")], dtype=np.float32)
        if len(pictures := image or []) > len(cameras):
            raise ValueError(f"there are {len(pictures)} pictures; the policy sees {', '.join(cameras) or 'none'}")
        arrays.update(zip(cameras, map(_picture, pictures), strict=False))  # the file may have the others
        if "state" not in arrays:
            raise ValueError("there is no state: give --state, or an --observation file with an array 'state'")
        text = instruction or str(arrays.get("instruction", ""))
        seen = {name: arrays[name] for name in cameras if name in arrays}
        chunk = handle.act(seen, text, arrays["state"], version=version, seed=seed)
    if json:
        print_json({"version": chunk.version, "actions": chunk.actions.tolist()})
        return
    typer.echo(f"version {chunk.version}, {chunk.actions.shape[0]} actions:")
    for row in chunk.actions:
        typer.echo("  " + "  ".join(f"{value: .4f}" for value in row))


def export(
    policy: Annotated[str, typer.Argument(help="Name of the policy.")],
    folder: Annotated[Path, typer.Argument(help="Folder to write.")],
    version: Annotated[int, typer.Option(help="Version; 0: the newest.")] = 0,
    config: Config = None,
) -> None:
    """Write a version as a folder that `joynexus.load_policy` runs without the cluster."""
    with client(config) as connected:
        target = connected.policy(policy).export(folder, version)
    typer.echo(f"wrote {', '.join(sorted(path.name for path in target.iterdir()))} to {target}")


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


def _arrays(path: Path) -> dict[str, Any]:
    import zipfile

    import numpy as np

    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except (zipfile.BadZipFile, ValueError, AttributeError, EOFError) as error:
        raise ValueError(f"{path} is no .npz file of plain arrays: write it with numpy.savez") from error


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


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise ValueError(f"'{text}' is no number") from error


def _picture(path: Path) -> Any:
    import numpy as np

    try:
        from PIL import Image
    except ImportError as error:
        raise ValueError("pictures need pillow (pip install pillow); or pass --observation with arrays") from error
    with Image.open(path) as picture:
        return np.asarray(picture.convert("RGB"))
