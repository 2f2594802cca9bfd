"""`joynexus admin limits set | show | clear`: what each tenant may have. For whoever holds the folder of keys.

In: options. Out: `limits.json` in the folder of keys; the master reads it within about a second. Never: a tenant that
no key stands for, or a limit that the master would not take.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from joynexus.cli._common import FOLDER, Folder, Json, KeysDir, human_bytes, keys_folder, print_json, print_table

if TYPE_CHECKING:
    from joynexus.tenants import TenantLimitsFile

commands = typer.Typer(help="Give each tenant its share, its place in line, its limits.", no_args_is_help=True)
Tenant = Annotated[str, typer.Argument(help="Name of the tenant.")]


@commands.command("set")
def set_(
    tenant: Tenant,
    weight: Annotated[float | None, typer.Option(help="Share of device time relative to others' (default 1).")] = None,
    priority: Annotated[int | None, typer.Option(help="-10 to 10: a higher one always goes first.")] = None,
    max_inflight_ops: Annotated[int | None, typer.Option(help="Ops of a policy that may wait unanswered.")] = None,
    max_waiting_acts: Annotated[int | None, typer.Option(help="Requests to act that may wait.")] = None,
    max_act_bytes: Annotated[int | None, typer.Option(help="Bytes of requests to act under way.")] = None,
    quota_bytes: Annotated[int | None, typer.Option(help="Bytes of blobs kept.")] = None,
    max_policies: Annotated[int | None, typer.Option(help="Policies.")] = None,
    max_requests_per_s: Annotated[int | None, typer.Option(help="Requests a second, by all its keys.")] = None,
    max_blob_requests_per_s: Annotated[int | None, typer.Option(help="Likewise, of blobs' chunks.")] = None,
    state_dir: Folder = FOLDER,
    keys_dir: KeysDir = None,
) -> None:
    """Change some of a tenant's limits; those that are not given stay."""
    given = {
        "weight": weight, "priority": priority, "max_inflight_ops": max_inflight_ops,
        "max_waiting_acts": max_waiting_acts, "max_act_bytes": max_act_bytes, "quota_bytes": quota_bytes,
        "max_policies": max_policies, "max_requests_per_s": max_requests_per_s,
        "max_blob_requests_per_s": max_blob_requests_per_s,
    }  # fmt: skip
    fields = {name: value for name, value in given.items() if value is not None}
    if not fields:
        raise ValueError("nothing to set: give at least one limit, e.g. --weight 2")
    folder = keys_folder(state_dir, keys_dir)
    _check_tenant(folder, tenant)
    limits = _file(folder).change(tenant, fields)
    typer.echo(f"tenant '{tenant}': " + ", ".join(f"{name} {getattr(limits, name)}" for name in fields))


@commands.command()
def show(
    tenant: Annotated[str, typer.Argument(help="Only this tenant.")] = "",
    state_dir: Folder = FOLDER,
    keys_dir: KeysDir = None,
    json: Json = False,
) -> None:
    """Show the limits of the tenants that have some of their own; the others have the service's defaults."""
    every = _file(keys_folder(state_dir, keys_dir)).load()
    if tenant:
        every = {name: limits for name, limits in every.items() if name == tenant}
    if json:
        print_json(every)
        return
    if not every:
        typer.echo(f"{f'tenant {tenant!r} has' if tenant else 'all tenants have'} the service's defaults")
        return
    rows = [
        (name, limits.weight, limits.priority, _shown(limits.max_inflight_ops), _shown(limits.max_waiting_acts),
         _shown_bytes(limits.max_act_bytes), _shown_bytes(limits.quota_bytes), _shown(limits.max_policies),
         _shown(limits.max_requests_per_s), _shown(limits.max_blob_requests_per_s))
        for name, limits in sorted(every.items())
    ]  # fmt: skip
    print_table(
        ("tenant", "weight", "priority", "ops", "acts", "act bytes", "quota", "policies", "asks/s", "blobs/s"), rows
    )
    typer.echo("-: the service's default")


@commands.command()
def clear(tenant: Tenant, state_dir: Folder = FOLDER, keys_dir: KeysDir = None) -> None:
    """Give a tenant the service's defaults again."""
    _file(keys_folder(state_dir, keys_dir)).clear(tenant)
    typer.echo(f"tenant '{tenant}' has the service's defaults")


def _file(folder: Path) -> TenantLimitsFile:
    from joynexus.tenants import TenantLimitsFile

    return TenantLimitsFile(folder / "limits.json")


def _check_tenant(folder: Path, tenant: str) -> None:
    from joynexus.keys import KeyRegistry

    tenants = sorted({entry.tenant for entry in KeyRegistry(folder / "registry.json").list() if entry.tenant})
    if tenant not in tenants:
        raise ValueError(f"no key stands for a tenant '{tenant}'; there are {', '.join(tenants) or 'none'}")


def _shown(limit: int | None) -> str:
    return "-" if limit is None else str(limit)


def _shown_bytes(limit: int | None) -> str:
    return "-" if limit is None else human_bytes(limit)
