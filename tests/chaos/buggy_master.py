"""`python -m tests.chaos.buggy_master`: a master in whose handlers a bug was planted.

In: settings of a master. Out: one that raises over requests for a policy of the name `CURSED`, and over `Leaving` of
workers. Never: another difference.
"""

from __future__ import annotations

from typing import Any

from joynexus.wire.back import Leaving
from joynexus.wire.front import GetPolicy
from services.master.__main__ import main
from services.master.core import MasterCore

CURSED = "cursed"


def plant() -> None:
    """Have the core raise."""
    make = MasterCore.__init__

    def with_bugs(core: MasterCore, *args: Any, **more: Any) -> None:
        make(core, *args, **more)
        get = core._front[GetPolicy]

        def look_up(asked: Any, message: Any) -> None:
            if message.policy == CURSED:
                raise KeyError("planted for tenants")
            get(asked, message)

        def leave(said: Any, message: Any) -> None:
            raise KeyError("planted for workers")

        core._front[GetPolicy], core._back[Leaving] = look_up, leave

    MasterCore.__init__ = with_bugs  # type: ignore[method-assign]  # that is the bug


if __name__ == "__main__":
    plant()
    main()
