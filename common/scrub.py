"""What others may not read is taken out of texts: keys, tenants' words, and their names unless those may stay.

In: secrets, words, names by kind; texts and JSON values. Out: the same with `[key]`, `[tenants' text]`, `tenant-1` in
their places, one name always by the same stand-in. Never: a known one that stays because of what is around it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

_FIELDS = {"tenant": "tenant", "by": "tenant", "policy": "policy", "dataset": "dataset", "holder": "holder"}
"""Fields of log lines and messages that hold names, whatever they are."""
_FIELD = re.compile(rf"""\b({"|".join(_FIELDS)})=('[^']*'|"[^"]*"|[^\s,)\]}}]+)""")
_SECRET_NAME = r"[\w.-]*(?:secret|password|passwd|token|api_?key|authorization|cookie)"
_SECRET_FIELD = re.compile(_SECRET_NAME, re.IGNORECASE)
_SECRET_LINE = re.compile(
    rf"""({_SECRET_NAME})(["']?\s*[=:]\s*)("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|(?:(?:Bearer|Basic)\s+)?\S+)""",
    re.IGNORECASE,
)
_SECRET_URL = re.compile(r"(\w://)[^\s/@:]*:[^\s/@]+@")

_LONG = 8


class Scrub:
    """Takes words out.

    Args:
        secrets: keys, both halves.
        words: what tenants wrote: instructions, robots, paths, keys of their jobs.
        names: names by kind (`tenant`, `policy`, …).
        keep_names: names may stay.
    """

    def __init__(
        self, secrets: Iterable[str], words: Iterable[str], names: Mapping[str, Iterable[str]], *, keep_names: bool
    ) -> None:
        self._keep_names = keep_names
        self._stand_ins: dict[str, str] = {}
        if not keep_names:
            for kind, found in names.items():
                for name in sorted(set(found) - {""}):
                    self._stand_in(kind, name)
        kept = {name for found in names.values() for name in found} if keep_names else set()
        self._fixed = {
            form: "[tenants' text]" for word in words if word.strip() and word not in kept for form in _forms(word)
        }
        self._fixed |= {secret: "[key]" for secret in secrets if secret}
        self._pattern: re.Pattern[str] | None = None

    def text(self, text: str) -> str:
        """Return a text without them."""
        text = _SECRET_URL.sub(r"\1[key]@", _SECRET_LINE.sub(r"\1\2[key]", text))
        if not self._keep_names:
            text = _FIELD.sub(self._field, text)
        if self._pattern is None:
            self._pattern = self._compile()
        return self._pattern.sub(lambda found: self._for(found[0]), text) if self._pattern.pattern else text

    def value(self, value: Any, field: str = "") -> Any:  # Any: JSON
        """Return a JSON value without them."""
        match value:
            case str() if field in _FIELDS and value and not self._keep_names:
                return self._stand_in(_FIELDS[field], value)
            case str() if value and _SECRET_FIELD.fullmatch(field):
                return "[key]"
            case str():
                return self.text(value)
            case dict():
                return {self.text(str(key)): self.value(part, str(key)) for key, part in value.items()}
            case list() | tuple():
                return [self.value(part, field) for part in value]
        return value

    def _stand_in(self, kind: str, name: str) -> str:
        if name not in self._stand_ins:
            number = sum(known.startswith(f"{kind}-") for known in self._stand_ins.values()) + 1
            self._stand_ins[name] = f"{kind}-{number}"
            self._pattern = None
        return self._stand_ins[name]

    def _field(self, found: re.Match[str]) -> str:
        name = found[2].strip("'\"")
        if name in self._stand_ins.values() or not name:
            return found[0]
        return f"{found[1]}={self._stand_in(_FIELDS[found[1]], name)}"

    def _for(self, found: str) -> str:
        return self._fixed.get(found) or self._stand_ins.get(found) or found

    def _compile(self) -> re.Pattern[str]:
        # Long texts and keys anywhere; what is short as a word of its own, or it would be found within others.
        parts = []
        for word in sorted({*self._fixed, *self._stand_ins}, key=len, reverse=True):
            whole = word in self._fixed and len(word) >= _LONG
            parts.append(re.escape(word) if whole else rf"(?<![0-9A-Za-z_-]){re.escape(word)}(?![0-9A-Za-z_-])")
        return re.compile("|".join(parts))


def _forms(word: str) -> set[str]:
    """Return a text as it may stand in a log: as it is, in quotes of Python's, and either of them in JSON."""
    spoken = {word, repr(word)[1:-1], repr(f"{word}'\"")[1:-4]}  # the last: within a text that has both quotes
    return spoken | {json.dumps(each, ensure_ascii=ascii_)[1:-1] for each in spoken for ascii_ in (True, False)}
