"""Asking a policy for actions."""

from __future__ import annotations

from joynexus.bounds import Few, Many, Short, Text
from joynexus.wire.arrays import Array
from joynexus.wire.base import Wire


class Act(Wire, frozen=True, kw_only=True):
    """Ask a served policy for actions, for R rows at once. Safe to repeat. Answer: `Actions`.

    Attributes:
        version: 0 means the newest one in service.
        state: [R, S] float32, raw units.
        images: one [R, H, W, 3] uint8 array per camera, in the contract's order.
        instructions: R task texts.
        contract: digest of the asker's contract, checked against the policy's if set.
        seeds: one a row, for heads that draw (flow matching): the same seed draws the same noise whatever else is in
            the group; empty means 0 for each row. A rollout derives it from (episode seed, step).
        explore: draw the actions as the policy's RL job says, and tell what training needs to know of them. For
            rollouts; refused for a version that was not published by an RL job.
    """

    policy: Short
    version: int = 0
    state: Array
    images: Few[Array]
    instructions: Many[Text]
    contract: Short = ""
    seeds: Many[int] = ()
    explore: bool = False


class Exploration(Wire, frozen=True, kw_only=True):
    """What training needs to know of actions that were drawn. V is 0 without a value head, else 1 or the chunk.

    Attributes:
        sample: [R, …] float32, what the head drew, from which it finds the log-probability again.
        log_prob: [R, chunk, A] float32, of each number drawn; how they are summed is the algorithm's choice.
        value: [R, V] float32.
    """

    sample: Array
    log_prob: Array
    value: Array


class Actions(Wire, frozen=True, kw_only=True):
    """Actions of one version.

    Attributes:
        version: which version acted.
        actions: [R, chunk, A] float32, raw units.
        exploration: set if `explore` was.
    """

    version: int
    actions: Array
    exploration: Exploration | None = None
