"""`joynexus admin keys add | rotate | revoke | list`: who may connect. For whoever holds the folder of keys.

`joynexus admin tenants` is in `_tenants.py`, `joynexus admin journal` in `_journal.py`; `joynexus admin move` asks the
cluster, with an operator's key.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

import typer

from joynexus.cli import _backup, _dump, _journal, _tenants
from joynexus.cli._common import FOLDER, Config, Folder, Json, KeysDir, client, keys_folder, print_json, print_table

if TYPE_CHECKING:
    from joynexus.keyring import Keyring

commands = typer.Typer(help="For operators.", no_args_is_help=True)
keys = typer.Typer(help="Let in and shut out.", no_args_is_help=True)
commands.add_typer(keys, name="keys")
commands.add_typer(_tenants.commands, name="tenants")
commands.add_typer(_journal.commands, name="journal")
commands.command()(_backup.backup)
commands.command()(_backup.restore)
commands.command()(_dump.dump)


@commands.command()
def move(
    policy: Annotated[str, typer.Argument(help="Name of the policy; TENANT/POLICY for somebody else's.")],
    trainer: Annotated[str, typer.Argument(help="Name of the trainer: `worker` in `joynexus status`.")],
    config: Config = None,
) -> None:
    """Have a policy live on another trainer. It goes between two optimizer steps; nobody's numbers change."""
    tenant, _, name = policy.rpartition("/")
    with client(config) as connected:
        info = connected.move_policy(name, trainer, tenant=tenant)
    typer.echo(f"policy '{policy}' lives on {info.home}")


@keys.command()
def prepare(
    keys_dir: Annotated[Path, typer.Option(help="The folder of keys; what is there already stays.")],
    front_control: Annotated[str, typer.Option(help="Where tenants dial the master.")] = "tcp://127.0.0.1:5710",
    front_bulk: Annotated[str, typer.Option(help="And for bulk.")] = "tcp://127.0.0.1:5711",
    back_control: Annotated[str, typer.Option(help="Where workers dial the master.")] = "tcp://127.0.0.1:5712",
    back_bulk: Annotated[str, typer.Option(help="And for bulk.")] = "tcp://127.0.0.1:5713",
) -> None:
    """Make the keys of a new cluster: the master's, one for each role, and `default`, its operator's."""
    from joynexus.keyring import Addresses, Keyring

    keyring = Keyring(keys_dir)
    keyring.prepare(
        Addresses(front_control=front_control, front_bulk=front_bulk, back_control=back_control, back_bulk=back_bulk)
    )
    if not keyring.cluster_file("default").exists():
        keyring.issue("default", tenant="default", operator=True)
    typer.echo(f"keys are in {keys_dir}; the operator's are in {keys_dir / 'default'}")


@keys.command()
def add(
    name: Annotated[str, typer.Argument(help="Name of the key.")],
    tenant: Annotated[str, typer.Option(help="Whose it is; otherwise the key's name.")] = "",
    scope: Annotated[str, typer.Option(help="all, act (look and ask for actions) or read.")] = "all",
    operator: Annotated[bool, typer.Option("--operator", help="Also sees other tenants in status and usage.")] = False,
    role: Annotated[
        list[str] | None, typer.Option(help="Instead of a tenant's: a worker's key that claims this role.")
    ] = None,
    state_dir: Folder = FOLDER,
    keys_dir: KeysDir = None,
) -> None:
    """Make a key; its folder is what its owner is given."""
    keyring = _keyring(state_dir, keys_dir)
    if role:
        if tenant or operator or scope != "all":
            raise ValueError("a worker's key has roles only: leave out --tenant, --scope and --operator")
        path, whose = keyring.issue_worker(name, roles=tuple(role)), f"for {', '.join(role)}"
    else:
        if scope not in ("all", "act", "read"):
            raise ValueError(f"'{scope}' is no scope: it is all, act or read")
        chosen = cast("Literal['all', 'act', 'read']", scope)
        path = keyring.issue(name, tenant=tenant or name, scope=chosen, operator=operator)
        whose = f"of tenant '{tenant or name}', scope {scope}"
    typer.echo(f"made key '{name}' {whose}")
    if role:
        typer.echo(
            f"copy the folder {path.parent} to where it runs: JOYNEXUS_CLUSTER_FILE=…/client.toml names it there"
        )
    else:
        _tenants.hand_out(path)


@keys.command()
def rotate(
    name: Annotated[str, typer.Argument(help="Name of the key.")],
    grace_hours: Annotated[
        float, typer.Option(help="Hours for which the key of now is let in too. 0: shut out at once.", min=0.0)
    ] = 24.0,
    state_dir: Folder = FOLDER,
    keys_dir: KeysDir = None,
) -> None:
    """Make a key anew, under the same name and with the same rights; the old one goes on for a while.

    A role takes its new key when it is started anew: `joynexus restart ROLE`.
    """
    path = _keyring(state_dir, keys_dir).rotate(name, grace_s=grace_hours * _tenants.HOUR_S)
    typer.echo(f"key '{name}' is new, in {path.parent}; the one before is {_tenants.let_in(grace_hours)}")


@keys.command()
def revoke(
    name: Annotated[str, typer.Argument(help="Name of the key.")],
    state_dir: Folder = FOLDER,
    keys_dir: KeysDir = None,
) -> None:
    """Shut a key out, with those of before that are still let in, from the next message on."""
    entry = _keyring(state_dir, keys_dir).registry.revoke(name)
    whose = f"tenant {entry.tenant}" if entry.tenant else f"roles {', '.join(entry.roles)}"
    typer.echo(f"key '{name}' ({whose}) is revoked")


@keys.command("list")
def list_(state_dir: Folder = FOLDER, keys_dir: KeysDir = None, json: Json = False) -> None:
    """List the keys that are let in; --json has their public halves, too."""
    entries = _keyring(state_dir, keys_dir).registry.list()
    if json:
        print_json(entries)
        return
    rows = [
        (e.name, e.tenant or "-", e.scope if e.tenant else "-", ", ".join(e.roles) or "-",
         "operator" if e.operator else "", _until(e.until_s))
        for e in entries
    ]  # fmt: skip
    print_table(("key", "tenant", "scope", "roles", "", "until"), rows)


def _until(time_s: float) -> str:
    return f"{datetime.fromtimestamp(time_s, UTC):%Y-%m-%d %H:%M} UTC" if time_s else ""


def _keyring(state_dir: Path, keys_dir: Path | None) -> Keyring:
    from joynexus.keyring import Keyring

    return Keyring(keys_folder(state_dir, keys_dir))
