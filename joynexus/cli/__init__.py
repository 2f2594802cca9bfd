"""The command line: `joynexus`. Thin: every command is a few calls of the client, and one sentence if they fail."""

from joynexus.cli._main import app

__all__ = ["app"]
