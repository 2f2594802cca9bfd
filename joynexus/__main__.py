"""`python -m joynexus`: the command line, without an installed script."""

from joynexus.cli import app

app()
