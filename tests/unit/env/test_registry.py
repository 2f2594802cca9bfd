"""Promises of the task registry: names, and what is missing here, are known without importing any simulator."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from joynexus.contract import Camera
from joynexus.simulation.interface import SimulatorError, SimulatorOptions
from services.env.simulators import metaworld
from services.env.simulators.metaworld_tasks import INSTRUCTIONS
from services.env.simulators.metaworld_tasks import contract as metaworld_contract
from services.env.simulators.registry import FAMILIES, family_of, make_simulator, survey, task_names


def test_all_fifty_tasks_of_metaworld_have_a_text_of_their_own() -> None:
    assert sum(name.startswith("metaworld/") for name in task_names()) == 50
    assert len(set(INSTRUCTIONS.values())) == 50
    assert INSTRUCTIONS["reach-v3"] == "move the gripper to the goal"


def test_tasks_are_those_of_metaworld() -> None:
    env_dict = pytest.importorskip("metaworld.env_dict")
    assert {f"{task}-goal-observable" for task in INSTRUCTIONS} == set(env_dict.ALL_V3_ENVIRONMENTS_GOAL_OBSERVABLE)


def test_names_and_what_is_missing_are_known_without_importing_a_simulator() -> None:
    script = (
        "import sys\n"
        "from services.env.simulators.metaworld_tasks import contract\n"
        "from services.env.simulators.registry import FAMILIES, SimulatorOptions, prepare_process, survey, task_names\n"
        "prepare_process(), survey(), task_names(), contract(SimulatorOptions())\n"
        "[family.software() for family in FAMILIES.values()]\n"
        "heavy = ('metaworld', 'mujoco', 'gymnasium', 'torch', 'mani_skill', 'sapien', 'libero', 'robosuite')\n"
        "print([name for name in heavy if name in sys.modules])\n"
    )
    root = Path(__file__).parents[3]
    run = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_every_family_knows_its_own_example() -> None:
    for name, family in FAMILIES.items():
        assert family_of(f"{name}/{family.example}") is family


def test_a_misspelt_task_gets_the_similar_ones() -> None:
    with pytest.raises(ValueError, match=r"no simulator task 'metaworld/raech-v3': did you mean metaworld/reach-v3"):
        family_of("metaworld/raech-v3")
    with pytest.raises(ValueError, match=r"did you mean metaworld/reach-v3\?"):
        family_of("metawurld/reach-v3")
    with pytest.raises(ValueError, match="tasks are named like metaworld/reach-v3, maniskill/"):
        family_of("?")


def test_what_is_missing_here_is_one_sentence_and_nothing_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metaworld, "find_spec", lambda name: None)
    sentence = "MetaWorld is not installed: pip install 'joynexus[metaworld]'"
    assert survey()["metaworld"] == sentence
    with pytest.raises(SimulatorError, match=re.escape(sentence)):
        make_simulator("metaworld/reach-v3")


def test_the_contract_states_what_changes_pixels_and_episodes() -> None:
    contract = metaworld_contract(SimulatorOptions())
    assert contract.cameras == (Camera(name="corner2", height=64, width=64, rotation_deg=180),)
    assert contract.episode_limit == 200
    assert contract.rendering == ("antialiasing=2x2", "reflections=off", "shadows=off")
    assert (len(contract.state_names), len(contract.action_names)) == (39, 4)
    blind = metaworld_contract(SimulatorOptions(cameras=(), episode_limit=500))
    assert (blind.cameras, blind.rendering, blind.episode_limit) == ((), (), 500)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            SimulatorOptions(cameras=(Camera(name="front", height=64, width=64),)),
            "no camera 'front': use one of corner",
        ),
        (SimulatorOptions(cameras=(Camera(name="corner", height=64, width=9999),)), "9999x64 pixels"),
        (SimulatorOptions(episode_limit=501), "1 to 500 steps"),
        (SimulatorOptions(episode_limit=-1), "1 to 500 steps"),
    ],
)
def test_what_metaworld_cannot_do_is_refused(options: SimulatorOptions, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        metaworld_contract(options)
