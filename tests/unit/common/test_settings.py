from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import structlog
from pydantic import ValidationError

from common import telemetry
from common.settings import MasterSettings, TrainerSettings, load_settings, refuse_unknown


def test_environment_sets_and_defaults_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JOYNEXUS_THREADS", "2")
    settings = load_settings(TrainerSettings)
    assert settings.threads == 2
    assert settings.backbone == "lite"
    assert settings.cluster_file == Path(".joynexus/keys/trainer/client.toml")


def test_wrong_value_is_named_with_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JOYNEXUS_THREADS", "many")
    with pytest.raises(ValueError, match="JOYNEXUS_THREADS='many' is not valid"):
        load_settings(TrainerSettings)


def test_misspelt_variable_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="JOYNEXUS_THREDS"):
        refuse_unknown({"JOYNEXUS_THREDS": "2"})
    refuse_unknown({"JOYNEXUS_THREADS": "2", "JOYNEXUS_CONFIG": "x", "PATH": "y"})


def test_misspelt_argument_is_refused() -> None:
    with pytest.raises(ValidationError, match="front_contrl"):
        MasterSettings(front_contrl="tcp://127.0.0.1:1")  # type: ignore[call-arg]


def test_settings_are_frozen() -> None:
    with pytest.raises(ValidationError):
        MasterSettings().beat_ms = 5  # type: ignore[misc]


def test_log_is_one_json_object_a_line_without_secrets_or_local_variables(
    capsys: pytest.CaptureFixture[str],
) -> None:
    root = logging.getLogger()
    before = root.handlers, root.level
    try:
        telemetry.configure("env", json_logs=True)
        log = telemetry.get_logger("test")
        telemetry.log_op(log, "act", outcome="ok", ms=1.23456, trace="r1", tenant="acme")
        log.info("keys", secret="hush")
        hidden = "local value"
        try:
            raise KeyError(len(hidden))
        except KeyError:
            log.exception("failed")
        logging.getLogger("library").warning("from %s", "elsewhere")
    finally:
        root.handlers, root.level = before
        structlog.reset_defaults()
    out = capsys.readouterr().out
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line["event"] for line in lines] == ["op", "keys", "failed", "from elsewhere"]
    assert all(line["role"] == "env" and line["timestamp"] for line in lines)
    assert (lines[0]["op"], lines[0]["outcome"], lines[0]["ms"], lines[0]["trace"]) == ("act", "ok", 1.235, "r1")
    assert "hush" not in out
    assert "local value" not in out
    assert lines[2]["exception"][0]["exc_type"] == "KeyError"


@pytest.mark.parametrize("devices", ["cuda:0,cpu", "cuda:0,cuda:0", "cpu,", "cuda,cuda", "gpu:0"])
def test_devices_that_cannot_share_rows_are_refused(monkeypatch: pytest.MonkeyPatch, devices: str) -> None:
    monkeypatch.setenv("JOYNEXUS_DEVICES", devices)
    with pytest.raises(ValueError, match=r"JOYNEXUS_DEVICES.*give different GPUs"):
        load_settings(TrainerSettings)


def test_policies_are_trained_where_the_first_rows_are(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_settings(TrainerSettings).places == ("cpu",)
    monkeypatch.setenv("JOYNEXUS_DEVICES", "cuda:1,cuda:0")
    assert load_settings(TrainerSettings).places == ("cuda:1", "cuda:0")
