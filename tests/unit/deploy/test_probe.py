"""The health check of containers asks the role itself."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from common.http_port import probe_port

FILE = Path(__file__).resolve().parents[3] / "deploy" / "probe.py"


@pytest.fixture(scope="module")
def probe() -> ModuleType:
    spec = importlib.util.spec_from_file_location("probe", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_container_is_healthy_when_its_role_is_ready_and_says_why_it_is_not(
    probe: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    sentence = ["loading"]
    port = probe_port("127.0.0.1:0", alive=lambda: "", ready=lambda: sentence[0], metrics=bytes)
    port.start()
    listen = f"0.0.0.0:{port.port}"
    assert probe.main(listen) == 1
    assert probe.main(listen, "/healthz") == 0
    sentence[0] = ""
    assert probe.main(listen) == 0
    port.stop()
    assert probe.main(listen) == 1
    assert capsys.readouterr().out.splitlines()[:3] == ["loading", "ok", "ok"]
