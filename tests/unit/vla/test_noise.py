"""Promises of derived noise: a row's draws depend on its own seed alone."""

from __future__ import annotations

import torch

from joynexus.seeds import derived_seed
from joynexus.vla.noise import Noise


def test_a_rows_draws_do_not_depend_on_the_rows_beside_it() -> None:
    alone, among = Noise([7]), Noise([1, 7, 2])
    assert torch.equal(alone.normal(3, 2)[0], among.normal(3, 2)[1])
    assert torch.equal(alone.uniform(5)[0], among.uniform(5)[1]), "the second draw, too"


def test_successive_draws_differ_and_the_same_seed_repeats_them() -> None:
    noise, again = Noise([7, 8]), Noise([7, 8])
    first, second = noise.normal(4), noise.normal(4)
    assert not torch.equal(first, second)
    assert not torch.equal(first[0], first[1])
    assert torch.equal(torch.stack([again.normal(4), again.normal(4)]), torch.stack([first, second]))


def test_the_global_generator_is_left_alone() -> None:
    before = torch.random.get_rng_state()
    Noise([1]).normal(100)
    Noise([1]).uniform()
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_derived_seed_tells_apart_what_was_mixed() -> None:
    parts: list[tuple[int | str, ...]] = [(1, "train", 2, 3), (1, "train", 3, 2), (1, "act", 2, 3), (12, 3), (1, 23)]
    seeds = {derived_seed(*each) for each in parts}
    assert len(seeds) == len(parts)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert derived_seed(1, "train", 2, 3) == derived_seed(1, "train", 2, 3)
