"""`joynexus dashboard`: a way into the dashboard.

In: this tenant's key. Out: an address that works once. Never: a key, or anything else that is good for longer, in a
browser's address.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from joynexus.cli._common import Config, client

if TYPE_CHECKING:
    from joynexus.wire.front import DashboardCode


def dashboard(
    config: Config = None,
    open: Annotated[bool, typer.Option("--open", help="Open it in this machine's browser.")] = False,
    url: Annotated[str, typer.Option(help="Where the dashboard is, if not where the cluster says.")] = "",
) -> None:
    """Print an address of the dashboard that lets you in once; you see there what your key may see."""
    with client(config) as connected:
        entry = connected.open_dashboard()
    address = address_of(entry, url)
    typer.echo(address)
    typer.echo(f"It works once, within {entry.valid_s:.0f} s; the code alone is {entry.code}", err=True)
    if open:
        import webbrowser

        if not webbrowser.open(address):
            raise ValueError("this machine has no browser that could be opened: open the address yourself")


def address_of(entry: DashboardCode, url: str = "") -> str:
    """Return the address that lets somebody in; ValueError if nobody knows where the dashboard is."""
    base = (url or entry.url).rstrip("/")
    if not base:
        raise ValueError(
            "no dashboard is connected to this cluster: have its operator start one, or say with --url where it is"
        )
    return f"{base}/login?code={entry.code}"
