"""Draw the state machines of `docs/architecture.md` from the tables in the code.

In: the transition tables. Out: the page with its diagrams replaced. Never: a diagram drawn by hand.
"""

from __future__ import annotations

from pathlib import Path

from services.master.ops import TRANSITIONS, OpState

PAGE = Path(__file__).with_name("architecture.md")
BEGIN, END = "<!-- op states -->\n", "<!-- end -->"


def diagram() -> str:
    """Return the op's transition table as a Mermaid state diagram."""
    lines = [f"    [*] --> {OpState.RECEIVED}"]
    for state, following in TRANSITIONS.items():
        lines += [f"    {state} --> {to}" for to in sorted(following)]
        if not following:
            lines.append(f"    {state} --> [*]")
    return "\n".join(["```mermaid", "stateDiagram-v2", *lines, "```", ""])


def drawn(page: str) -> str:
    """Return the page with its diagram as the table says."""
    head, rest = page.split(BEGIN)
    _, tail = rest.split(END, 1)
    return head + BEGIN + diagram() + END + tail


if __name__ == "__main__":
    PAGE.write_text(drawn(PAGE.read_text()))
