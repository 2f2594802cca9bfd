"""Promises of installed action modules: found by entry point, and harmless where they are broken."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from joynexus.specs import ExplorationSpec, OptimizerSpec
from joynexus.vla import heads
from joynexus.vla.heads.installed import GROUP
from joynexus.vla.learner import Learner
from joynexus.vla.modules import check_modules
from joynexus.vla.policy import Policy
from joynexus.vla.version_file import read_version, write_version
from joynexus.wire.back import RlBegin
from tests.unit.vla.samples import DIGEST, HIDDEN, batch, policy_spec

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = ROOT / "examples" / "action_module"

HEAD = """
from joynexus.vla.heads.oft import Oft

class Mine(Oft):
    '''An `oft` by another name.'''

class Unfinished(Oft.__base__):
    '''Defines nothing.'''
"""


def install(folder: Path, name: str, entry_points: dict[str, str], **modules: str) -> None:
    """Lay a package out as pip does."""
    info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = "\n".join(f"{key} = {value}" for key, value in entry_points.items())
    (info / "entry_points.txt").write_text(f"[{GROUP}]\n{lines}\n")
    for module, source in modules.items():
        (folder / f"{module}.py").write_text(source)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the path whose packages are found anew by this test alone."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    heads._heads.cache_clear()
    yield folder
    heads._heads.cache_clear()
    for source in folder.glob("*.py"):
        sys.modules.pop(source.stem, None)


def refusal(name: str) -> str:
    with pytest.raises(ValueError, match=name) as refused:
        check_modules(policy_spec(head=name, head_config={}), HIDDEN)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_the_example_is_found_trained_and_published_as_its_pyproject_says(site: Path, tmp_path: Path) -> None:
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())
    sources = {name: (EXAMPLE / f"{name}.py").read_text() for name in project["tool"]["setuptools"]["py-modules"]}
    install(site, project["project"]["name"], project["project"]["entry-points"][GROUP], **sources)
    assert heads.known_heads() == ("groot", "mean_pool", "oft")
    spec = policy_spec(head="mean_pool", head_config={"width": 32}, optimizer=OptimizerSpec(lr=1e-2))
    learner = Learner(Policy(spec, DIGEST, HIDDEN))
    losses = []
    for _ in range(60):
        losses.append(learner.forward_backward(*batch(0).arguments())["loss"])
        learner.optim_step()
    assert losses[-1] < 0.3 * losses[0]
    write_version(tmp_path / "v", learner.policy, 1)
    data = batch(1)
    np.testing.assert_array_equal(
        read_version(tmp_path / "v").policy.act(data.features, data.state),
        learner.policy.act(data.features, data.state),
    )
    with pytest.raises(ValueError, match=r"head_config of 'mean_pool'.*known keys: width, layers"):
        check_modules(policy_spec(head="mean_pool", head_config={"depth": 3}), HIDDEN)
    begin = RlBegin(exploration=ExplorationSpec(), critic=None, values=1, optimizer=OptimizerSpec())
    with pytest.raises(ValueError, match=r"'mean_pool' cannot explore, so it .* rewards; heads that can: groot, oft"):
        learner.begin_rl(begin)
    learner.forward_backward(*batch(0).arguments())


def test_a_module_that_cannot_be_imported_stops_nothing_and_is_named_with_the_reason(
    site: Path, caplog: pytest.LogCaptureFixture
) -> None:
    install(site, "good-pack", {"good": "good_module:Mine"}, good_module=HEAD)
    install(site, "bad-pack", {"bad": "bad_module:Mine"}, bad_module="raise RuntimeError('no licence\\nfound')")
    install(site, "exit-pack", {"exits": "exit_module:Mine"}, exit_module="import sys; sys.exit(3)")
    install(site, "absent-pack", {"absent": "no_such_module:Mine"})
    with caplog.at_level(logging.WARNING):
        assert heads.known_heads() == ("good", "groot", "oft")
        assert heads.known_heads() == ("good", "groot", "oft")
    assert len(caplog.records) == 3, "once for each broken module"
    assert refusal("bad") == (
        "the head 'bad' is installed here but cannot be used, because importing 'bad_module:Mine' of package "
        "'bad-pack' failed with RuntimeError: no licence; usable heads are: good, groot, oft"
    )
    assert "failed with SystemExit: 3" in refusal("exits")
    assert "failed with ModuleNotFoundError" in refusal("absent")
    assert check_modules(policy_spec(head="good"), HIDDEN) > 0


def test_a_package_with_torn_metadata_stops_nothing(site: Path, caplog: pytest.LogCaptureFixture) -> None:
    install(site, "nameless-pack", {"nameless": "no_such_module:Mine"})
    next(site.glob("*/METADATA")).unlink()
    assert heads.known_heads() == ("groot", "oft")
    assert "importing 'no_such_module:Mine' of package 'no_such_module' failed" in refusal("nameless")
    install(site, "torn-pack", {"torn": "torn_module:Mine"})
    (site / "torn_pack-1.0.dist-info" / "entry_points.txt").write_text(f"[{GROUP}]\ntorn\n")
    heads._heads.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert heads.known_heads() == ("groot", "oft")
    assert "entry points cannot be read" in caplog.text


def test_what_is_no_action_module_is_refused(site: Path) -> None:
    entries = {"number": "some_module:NUMBER", "other": "some_module:Other", "part": "some_module:Unfinished"}
    install(site, "some-pack", entries, some_module=HEAD + "\nNUMBER = 3\nclass Other: pass\n")
    assert heads.known_heads() == ("groot", "oft")
    assert "'some_module:NUMBER' of package 'some-pack' is no subclass" in refusal("number")
    assert "is no subclass of joynexus.vla.heads.ActionModule" in refusal("other")
    assert "does not define forward, from_spec, loss" in refusal("part")


def test_a_name_that_two_packages_have_belongs_to_neither(site: Path) -> None:
    install(site, "one-pack", {"mine": "one_module:Mine"}, one_module=HEAD)
    install(site, "two-pack", {"mine": "two_module:Mine"}, two_module=HEAD)
    assert "mine" not in heads.known_heads()
    assert "the packages 'one-pack' and 'two-pack' all have a module of this name; uninstall all but one" in refusal(
        "mine"
    )


def test_a_built_in_module_cannot_be_replaced(site: Path, caplog: pytest.LogCaptureFixture) -> None:
    install(site, "usurper", {"oft": "usurper_module:Mine"}, usurper_module=HEAD)
    with caplog.at_level(logging.WARNING):
        assert type(heads.build_head(policy_spec(), HIDDEN)).__module__ == "joynexus.vla.heads.oft"
    assert "'oft' is not available: the name is that of a built-in module, which stays in use; 'usurper' must" in (
        caplog.text
    )


def test_a_module_that_fails_to_build_is_one_sentence(site: Path) -> None:
    source = HEAD + "\n    @classmethod\n    def from_spec(cls, spec, hidden_size):\n        return {}['missing']\n"
    source = source.replace("Unfinished(Oft.__base__)", "Faulty(Oft)")
    install(site, "faulty-pack", {"faulty": "faulty_module:Faulty"}, faulty_module=source)
    assert refusal("faulty") == "the head 'faulty' failed with KeyError when it was built: 'missing'"


def test_a_process_with_a_broken_module_on_its_path_still_builds_policies(tmp_path: Path) -> None:
    """And checking a spec does not load a compiler, which torch does on the meta device for some ways to draw."""
    install(tmp_path, "bad-pack", {"bad": "bad_module:Mine"}, bad_module="raise RuntimeError('broken')")
    script = (
        "import sys\n"
        "from joynexus.vla.heads import known_heads\n"
        "from joynexus.vla.modules import check_modules\n"
        "from tests.unit.vla.samples import policy_spec\n"
        "for head in known_heads():\n"
        "    check_modules(policy_spec(head=head, head_config={}, adapter='bottleneck'), 32)\n"
        "print(*known_heads(), 'torch._inductor' in sys.modules)\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.split() == ["groot", "oft", "False"]
    assert "'bad' is not available" in done.stderr
