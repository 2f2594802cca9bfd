"""`joynexus policies | policies delete | load-weights | act | export`: policies and their use."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from joynexus.cli._common import Config, Json, client, print_json, print_table

PolicyName = Annotated[str, typer.Option(help="Name of the policy.")]


def add_to(app: typer.Typer) -> None:
    """Add these commands."""
    app.add_typer(commands, name="policies")
    for command in (load_weights, act, export):
        app.command()(command)


commands = typer.Typer(help="List policies (without a command), or delete some.")


@commands.command()
def delete(
    policy: Annotated[str, typer.Argument(help="Name of the policy.")],
    version: Annotated[int, typer.Option(min=0, help="Delete this version alone; 0: the policy with all it has.")] = 0,
    config: Config = None,
) -> None:
    """Delete a policy, or one of its versions, that nothing needs any more."""
    with client(config) as connected:
        if version:
            connected.policy(policy).delete_version(version)
        else:
            connected.delete_policy(policy)
    typer.echo(f"deleted {f'version {version} of ' if version else ''}policy '{policy}'")


@commands.callback(invoke_without_command=True)
def policies(context: typer.Context, config: Config = None, json: Json = False) -> None:
    """List policies: what they are, how far, where they live."""
    if context.invoked_subcommand is not None:
        return
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


def _arrays(path: Path) -> dict[str, Any]:
    import zipfile

    import numpy as np

    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except (zipfile.BadZipFile, ValueError, AttributeError, EOFError) as error:
        raise ValueError(f"{path} is no .npz file of plain arrays: write it with numpy.savez") from error


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
