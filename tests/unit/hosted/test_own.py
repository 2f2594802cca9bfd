"""A tenant's environment does what was asked, or says what is wrong with it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from examples.own_environment import point_mass
from joynexus.contract import Camera
from joynexus.simulation.interface import Simulator, SimulatorError, SimulatorOptions
from joynexus.simulation.own import load, make_own
from joynexus.specs import RlSpec, load_job
from services.master.checks import check_job
from tests.unit.hosted import environments

HERE = environments.__name__
STILL = np.zeros((1, 2), np.float32)


def make(function: str, **options: object) -> Simulator:
    return make_own(f"{HERE}:{function}", SimulatorOptions(**options))  # type: ignore[arg-type]


def to_the_middle(simulator: Simulator, state: np.ndarray, chunk: int = 4) -> np.ndarray:
    """Plan a chunk of forces that bring the point to rest in the middle, from its state alone."""
    position, velocity = state[:2].astype(np.float64), state[2:].astype(np.float64)
    forces = []
    for _ in range(chunk):
        force = np.clip(-4 * position - 3 * velocity, -1, 1)
        velocity = velocity + 0.1 * (force - 0.5 * velocity)
        position = position + 0.1 * velocity
        forces.append(force)
    return np.array(forces, np.float32)


def run(simulator: Simulator, seed: int, chunk: int = 4) -> list[object]:
    seen, results = simulator.reset(seed), []
    while not results or not results[-1].done:
        results.append(simulator.step_chunk(to_the_middle(simulator, seen.state, chunk)))
        seen = results[-1].observation
    return results


def test_success_ends_an_episode_at_that_very_action_only_if_that_was_asked() -> None:
    ends, goes_on = run(make("make_point"), 3), run(make("make_point", end_at_success=False), 3)
    assert ends[-1].success
    assert ends[-1].terminated
    assert not goes_on[-1].terminated
    assert any(result.success for result in goes_on)
    assert sum(result.steps for result in goes_on) == 60
    assert sum(result.steps for result in ends) == len(run(make("make_point"), 3, chunk=1))


def test_limit_of_the_job_takes_the_place_of_the_environments_own() -> None:
    simulator = make("make_point", episode_limit=7)
    assert simulator.contract.episode_limit == 7
    simulator.reset(0)
    first, second = (simulator.step_chunk(STILL.repeat(5, axis=0)) for _ in range(2))
    assert [(first.steps, first.done), (second.steps, second.done)] == [(5, False), (2, True)]
    assert not second.terminated


def test_cameras_are_chosen_by_name_and_drawn_only_if_wanted() -> None:
    left, right = environments.Seeing.contract.cameras
    assert make("make_seeing").contract.cameras == (left, right)
    one = make("make_seeing", cameras=(right,))
    assert [image.shape for image in one.reset(0).images] == [(2, 2, 3)]
    assert one.reset(0).images[0][0, 0, 0] == 2
    assert one.reset(0, render=False).images == ()
    assert len(one.step_chunk(STILL).observation.images) == 1
    blind = make("make_seeing", cameras=())
    assert blind.reset(0).images == ()
    with pytest.raises(ValueError, match="has no camera 'top' 4x4 rot 0: it has left 4x6, right 2x2"):
        make("make_seeing", cameras=(Camera(name="top", height=4, width=4),))


def test_last_picture_of_an_episode_is_drawn_only_if_it_is_asked_for() -> None:
    simulator = make("make_seeing", episode_limit=2)
    for final, count in ((False, 0), (True, 2)):
        simulator.reset(0)
        last = simulator.step_chunk(STILL.repeat(4, axis=0), final=final)
        assert (last.done, len(last.observation.images)) == (True, count)


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ("reward", "a reward is NaN or infinite"),
        ("rewards", r"rewards have shape \(3,\): give one for each executed action"),
        ("state", r"a state has shape \(9,\): the contract says \(4,\)"),
    ],
)
def test_numbers_that_cannot_be_are_told_apart(monkeypatch: pytest.MonkeyPatch, how: str, sentence: str) -> None:
    monkeypatch.setattr(environments, "make_point", lambda: environments.Broken(how))
    simulator = make("make_point")
    simulator.reset(0)
    with pytest.raises(ValueError, match=sentence):
        simulator.step_chunk(STILL)


def test_contract_made_of_numpy_numbers_and_lists_is_a_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    ones = np.ones(2, np.float32)
    loose = {"state_dim": np.int64(4), "action_low": tuple(-ones), "action_high": ones, "cameras": []}
    contract = msgspec.structs.replace(point_mass.PointMass.contract, **loose)
    monkeypatch.setattr(point_mass.PointMass, "contract", contract)
    assert make("make_point").contract == msgspec.structs.replace(
        contract, state_dim=4, action_low=(-1.0, -1.0), action_high=(1.0, 1.0), cameras=()
    )


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"state_dim": "four"}, r"contract is not valid: Expected `int`, got `str` - at `\$.state_dim`"),
        ({"robot": object()}, "contract is not valid: it holds a object"),
    ],
)
def test_contract_that_cannot_be_one_is_told_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], sentence: str
) -> None:
    contract = msgspec.structs.replace(point_mass.PointMass.contract, **changes)
    monkeypatch.setattr(point_mass.PointMass, "contract", contract)
    with pytest.raises(ValueError, match=sentence):
        make("make_point")


def test_chunks_that_cannot_be_executed_are_refused_before_the_environment_sees_them() -> None:
    simulator = make("make_point", episode_limit=2)
    with pytest.raises(ValueError, match="the episode has ended"):
        simulator.step_chunk(STILL)
    simulator.reset(0)
    with pytest.raises(ValueError, match=r"actions have shape \(1, 3\): a chunk is \[k, 2\]"):
        simulator.step_chunk(np.zeros((1, 3), np.float32))
    with pytest.raises(ValueError, match="not finite"):
        simulator.step_chunk(np.full((1, 2), np.nan, np.float32))
    assert simulator.step_chunk(STILL.repeat(5, axis=0)).steps == 2
    with pytest.raises(ValueError, match="the episode has ended"):
        simulator.step_chunk(STILL)


def test_function_may_take_the_options() -> None:
    assert make("make_limited", episode_limit=9).contract.robot == "limit 9"


def test_instruction_of_the_command_line_takes_the_place_of_its_own() -> None:
    assert make_own(f"{HERE}:make_point go there", SimulatorOptions()).instruction == "go there"
    assert make("make_point").instruction == "push the point to the middle"


@pytest.mark.parametrize(
    ("target", "sentence"),
    [
        ("point_mass", "'point_mass' names no function: name it as module:function"),
        ("no_such_module_here:make", "module 'no_such_module_here' cannot be imported .* looked for in"),
        (f"{HERE}:no_such", "has no function 'no_such'"),
        (f"{HERE}:not_a_function", "has no function 'not_a_function'"),
        (f"{HERE}:make_failing", "failed with RuntimeError: no licence for this physics"),
        (f"{HERE}:make_nothing", "returned a int: return a Simulator or a gymnasium.Env"),
    ],
)
def test_what_cannot_be_made_is_told_in_a_sentence(target: str, sentence: str) -> None:
    with pytest.raises(SimulatorError, match=sentence):
        make_own(target, SimulatorOptions())


def test_example_job_is_valid_and_names_the_example() -> None:
    spec = load_job((Path(point_mass.__file__).parent / "rl.yaml").read_text())
    check_job(spec)
    assert isinstance(spec, RlSpec)
    assert spec.env == "own/point_mass"


def test_module_that_fails_when_imported_says_how(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "breaks_when_imported.py").write_text("import a_package_that_is_not_here\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(SimulatorError, match="No module named 'a_package_that_is_not_here'"):
        load("breaks_when_imported:make")
