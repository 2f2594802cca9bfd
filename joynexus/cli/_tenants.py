"""`joynexus admin tenants add | list | limits | rotate | revoke`: who works here, and how much each may have.

In: options, the folder of keys. Out: its registry of keys and its `limits.json`; the master heeds both within about a
second. Never: a word with the cluster, but to cancel the jobs of a tenant that is shut out.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from joynexus.cli._common import (
    FOLDER,
    Config,
    Folder,
    Json,
    KeysDir,
    client,
    human_bytes,
    keys_folder,
    print_json,
    print_table,
)

if TYPE_CHECKING:
    from joynexus.keys import KeyEntry
    from joynexus.tenants import TenantLimits, TenantLimitsFile

commands = typer.Typer(help="Let tenants in and shut them out; what each may have.", no_args_is_help=True)
Tenant = Annotated[str, typer.Argument(help="Name of the tenant.")]


def _limit(help: str) -> Any:
    return typer.Option(metavar="N|none", help=help)


Weight = Annotated[str | None, _limit("Share of device time relative to others' (default 1).")]
Priority = Annotated[str | None, _limit("-10 to 10: a higher one always goes first.")]
Ops = Annotated[str | None, _limit("Ops of a policy that may wait unanswered.")]
Acts = Annotated[str | None, _limit("Requests to act that may wait.")]
ActBytes = Annotated[str | None, _limit("Bytes of requests to act under way.")]
Quota = Annotated[str | None, _limit("Bytes of blobs kept.")]
Policies = Annotated[str | None, _limit("Policies.")]
Budget = Annotated[str | None, _limit("What a month may cost, in the price list's currency.")]
Rate = Annotated[str | None, _limit("Requests a second, by all its keys.")]
BlobRate = Annotated[str | None, _limit("Likewise, of blobs' chunks.")]

NONE = "none"
"""Takes a limit back."""
HOUR_S = 3600.0


@commands.command()
def add(
    tenant: Tenant,
    operator: Annotated[bool, typer.Option("--operator", help="Also sees other tenants' work.")] = False,
    weight: Weight = None,
    priority: Priority = None,
    max_inflight_ops: Ops = None,
    max_waiting_acts: Acts = None,
    max_act_bytes: ActBytes = None,
    quota_bytes: Quota = None,
    max_policies: Policies = None,
    budget: Budget = None,
    max_requests_per_s: Rate = None,
    max_blob_requests_per_s: BlobRate = None,
    state_dir: Folder = FOLDER,
    keys_dir: KeysDir = None,
) -> None:
    """Let a tenant in: a key of its name with every right, and limits, if some are given."""
    from joynexus.keyring import Keyring
    from joynexus.tenants import TenantLimits

    fields = _given(
        weight=weight, priority=priority, max_inflight_ops=max_inflight_ops, max_waiting_acts=max_waiting_acts,
        max_act_bytes=max_act_bytes, quota_bytes=quota_bytes, max_policies=max_policies,
        budget=budget, max_requests_per_s=max_requests_per_s, max_blob_requests_per_s=max_blob_requests_per_s,
    )  # fmt: skip
    folder = keys_folder(state_dir, keys_dir)
    if names := _keys(folder, tenant):
        raise ValueError(
            f"tenant '{tenant}' is let in already, with {_named(names)}: `joynexus admin keys add NAME --tenant "
            f"{tenant}` makes another key, `joynexus admin tenants limits {tenant}` changes its limits"
        )
    fields = {name: value for name, value in fields.items() if value is not None}
    TenantLimits(**fields)  # refuses what cannot be meant, before there is a key
    path = Keyring(folder).issue(tenant, tenant=tenant, operator=operator)
    if fields:
        _file(folder).change(tenant, fields)
    typer.echo(f"tenant '{tenant}' is let in{f', with {_text(fields)}' if fields else ''}")
    hand_out(path)


@commands.command("list")
def list_(state_dir: Folder = FOLDER, keys_dir: KeysDir = None, json: Json = False) -> None:
    """List the tenants that are let in, and the limits of those that have some of their own."""
    from joynexus.tenants import TenantLimits

    folder = keys_folder(state_dir, keys_dir)
    every = _file(folder).load()
    found: dict[str, list[KeyEntry]] = {}
    for entry in _entries(folder):
        found.setdefault(entry.tenant, []).append(entry)
    if json:
        print_json([
            {"tenant": tenant, "keys": [entry.name for entry in entries], "limits": every.get(tenant, TenantLimits())}
            for tenant, entries in sorted(found.items())
        ])  # fmt: skip
        return
    columns = ("tenant", "keys", "", *(name for name, _ in _shown(TenantLimits())))
    rows = [
        (tenant, ", ".join(entry.name for entry in entries),
         "operator" if any(entry.operator for entry in entries) else "",
         *(text for _, text in _shown(every.get(tenant, TenantLimits()))))
        for tenant, entries in sorted(found.items())
    ]  # fmt: skip
    print_table(columns, rows)
    if any(tenant not in every for tenant in found):
        typer.echo("what is not there: the service's default")


@commands.command()
def limits(
    tenant: Tenant,
    weight: Weight = None,
    priority: Priority = None,
    max_inflight_ops: Ops = None,
    max_waiting_acts: Acts = None,
    max_act_bytes: ActBytes = None,
    quota_bytes: Quota = None,
    max_policies: Policies = None,
    budget: Budget = None,
    max_requests_per_s: Rate = None,
    max_blob_requests_per_s: BlobRate = None,
    default: Annotated[bool, typer.Option("--default", help="The service's defaults again, in all.")] = False,
    state_dir: Folder = FOLDER,
    keys_dir: KeysDir = None,
    json: Json = False,
) -> None:
    """Change some of a tenant's limits, and show them; those that are not given stay.

    `none` takes one back: the service's default holds then, and without a budget none.
    """
    from joynexus.tenants import TenantLimits

    fields = _given(
        weight=weight, priority=priority, max_inflight_ops=max_inflight_ops, max_waiting_acts=max_waiting_acts,
        max_act_bytes=max_act_bytes, quota_bytes=quota_bytes, max_policies=max_policies,
        budget=budget, max_requests_per_s=max_requests_per_s, max_blob_requests_per_s=max_blob_requests_per_s,
    )  # fmt: skip
    folder = keys_folder(state_dir, keys_dir)
    if not _keys(folder, tenant):
        tenants = sorted({entry.tenant for entry in _entries(folder)})
        raise ValueError(f"no key stands for a tenant '{tenant}'; there are {', '.join(tenants) or 'none'}")
    file = _file(folder)
    if default:
        if fields:
            raise ValueError("either --default or limits, not both")
        file.clear(tenant)
    elif fields:
        file.change(tenant, fields)
    now = file.load().get(tenant, TenantLimits())
    if json:
        print_json(now)
    else:
        own = {name: text for name, text in _shown(now) if text}
        typer.echo(f"tenant '{tenant}': {_text(own)}" if own else f"tenant '{tenant}' has the service's defaults")


@commands.command()
def rotate(
    tenant: Tenant,
    grace_hours: Annotated[
        float, typer.Option(help="Hours for which the keys of now are let in too. 0: shut out at once.", min=0.0)
    ] = 24.0,
    state_dir: Folder = FOLDER,
    keys_dir: KeysDir = None,
) -> None:
    """Make all keys of a tenant anew, under the same names; the old ones go on for a while."""
    from joynexus.keyring import Keyring

    folder = keys_folder(state_dir, keys_dir)
    names = _keys(folder, tenant)
    if not names:
        raise ValueError(f"no key stands for a tenant '{tenant}'")
    keyring = Keyring(folder)
    for name in names:
        path = keyring.rotate(name, grace_s=grace_hours * HOUR_S)
        hand_out(path)
    typer.echo(f"the keys of before ({', '.join(names)}) are {let_in(grace_hours)}")


@commands.command()
def revoke(
    tenant: Tenant,
    cancel_jobs: Annotated[bool, typer.Option("--cancel-jobs", help="Also cancel its jobs, by your own key.")] = False,
    config: Config = None,
    state_dir: Folder = FOLDER,
    keys_dir: KeysDir = None,
) -> None:
    """Shut a tenant out, with all its keys, from its next message on.

    What the cluster has taken on goes on: its jobs run to their end, unless they are cancelled too. What it has stays,
    for the day on which it is let in again under this name.
    """
    from joynexus.keys import KeyRegistry

    folder = keys_folder(state_dir, keys_dir)
    entries = [entry for entry in _entries(folder) if entry.tenant == tenant]
    if not entries and not cancel_jobs:
        raise ValueError(f"no key stands for a tenant '{tenant}'")
    registry = KeyRegistry(folder / "registry.json")
    names = {entry.name for entry in entries}
    for entry in entries:
        if entry.successor not in names:  # else it goes with that
            registry.revoke(entry.name)
    shut_out = f"tenant '{tenant}' is shut out: {_named([entry.name for entry in entries])} revoked"
    typer.echo(shut_out if entries else f"no key stands for a tenant '{tenant}'")
    if not cancel_jobs:
        typer.echo("jobs that it had started go on to their end; --cancel-jobs ends them")
        return
    with client(config) as connected:
        connected.cancel_jobs_of(tenant)
    typer.echo(f"jobs of tenant '{tenant}' that had not ended are cancelled")


def let_in(grace_hours: float) -> str:
    """Say how long a key that was replaced is let in."""
    return f"let in for {grace_hours:g} more hours" if grace_hours else "shut out"


def hand_out(path: Path) -> None:
    """Say what to give to whom a key is for, and what to do with it."""
    from joynexus.keys import ClusterFile

    address = ClusterFile.load(path).control
    typer.echo(
        f"give its owner the folder {path.parent}: client.toml says where to dial ({address}), key.toml is the secret\n"
        f"  there: put both into a folder .joynexus where the work is done, or set JOYNEXUS_CONFIG=…/client.toml"
    )


def _given(**said: str | None) -> dict[str, Any]:  # Any: floats, whole numbers, and None for `none`
    """Read limits as they were typed; ValueError if one is no number."""
    return {name: _read(name, text) for name, text in said.items() if text is not None}


def _read(name: str, text: str) -> float | int | None:
    whole = name not in ("weight", "budget")
    try:
        return None if text == NONE else int(text) if whole else float(text)
    except ValueError as error:
        option, number = name.replace("_", "-"), "a whole number" if whole else "a number"
        raise ValueError(f"--{option} takes {number}, or `{NONE}` to take it back, not '{text}'") from error


def _entries(folder: Path) -> Sequence[KeyEntry]:
    from joynexus.keys import KeyRegistry

    return [entry for entry in KeyRegistry(folder / "registry.json").list() if entry.tenant]


def _keys(folder: Path, tenant: str) -> list[str]:
    """Return the names of a tenant's keys, without those that were replaced and will end."""
    return [entry.name for entry in _entries(folder) if entry.tenant == tenant and not entry.until_s]


def _file(folder: Path) -> TenantLimitsFile:
    from joynexus.tenants import TenantLimitsFile

    return TenantLimitsFile(folder / "limits.json")


def _shown(limits: TenantLimits) -> list[tuple[str, str]]:
    """Return names of limits and their texts; empty where the service's default holds."""
    defaults = type(limits)()
    shown = []
    for name in limits.__struct_fields__:
        value = getattr(limits, name)
        text = "" if value == getattr(defaults, name) else human_bytes(value) if name.endswith("bytes") else f"{value}"
        shown.append((name, text))
    return shown


def _text(fields: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in fields.items())


def _named(keys: Sequence[str]) -> str:
    return f"key{'s' * (len(keys) > 1)} {', '.join(keys)}"
