"""Names of features: everything that a feature depends on, and whose it is.

In: an observation, a scope, what made the feature. Out: a key. Never: a scope's name in clear (keys are file names), or
two features of one key that differ in a bit.

Hidden states are no part of a key: one feature may be kept with several.
"""

from __future__ import annotations

import blake3
import msgspec

from joynexus.vla.feature import Observation

_SCOPE_DIGITS = 16


def feature_key(observation: Observation, *, scope: str, backbone: str, numerics_class: str) -> str:
    """Name a feature, 16 + 64 hex digits: first the scope, then the rest.

    Args:
        observation: pictures and instruction.
        scope: `tenant:<id>`, or `shared:<name>` for data sets and simulators that the operator marks shared.
        backbone: the backbone's digest.
        numerics_class: see `joynexus.vla.numerics`; it names the type, too.
    """
    hasher = blake3.blake3()
    head = (scope, backbone, numerics_class, observation.instruction)
    hasher.update(msgspec.msgpack.encode((*head, [image.shape for image in observation.images])))
    for image in observation.images:
        hasher.update(image.tobytes())
    return blake3.blake3(scope.encode()).hexdigest()[:_SCOPE_DIGITS] + hasher.hexdigest()


def scope_of(key: str) -> str:
    """Return the part of a key that all keys of its scope have in common."""
    return key[:_SCOPE_DIGITS]
