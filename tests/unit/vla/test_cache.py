"""Promises of the cache of converted weights: what has its final name is whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from joynexus.vla.backbones.cache import CHECKPOINT, build_once


def whole(folder: Path) -> None:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")


def half(folder: Path) -> None:
    """As transformers does in a process that has a rank above 0."""
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")


def test_a_folder_that_lacks_what_it_should_hold_never_gets_its_name(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"model was built without config\.json: nothing of it is kept"):
        build_once(tmp_path / "model", half, holds=CHECKPOINT)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_an_earlier_builder_left_incomplete_is_built_again(tmp_path: Path) -> None:
    half(tmp_path / "model")
    build_once(tmp_path / "model", whole, holds=CHECKPOINT)
    assert sorted(file.name for file in (tmp_path / "model").iterdir()) == ["config.json", "model.safetensors"]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_what_is_built_is_not_built_again(tmp_path: Path) -> None:
    build_once(tmp_path / "model", whole, holds=CHECKPOINT)
    build_once(tmp_path / "model", lambda folder: pytest.fail("it was there"), holds=CHECKPOINT)


def test_of_two_who_build_the_same_the_first_one_stays(tmp_path: Path) -> None:
    def slow(folder: Path) -> None:
        build_once(tmp_path / "model", whole, holds=CHECKPOINT)  # the other one, meanwhile
        whole(folder)
        (folder / "late").touch()

    assert build_once(tmp_path / "model", slow, holds=CHECKPOINT) == tmp_path / "model"
    assert not (tmp_path / "model" / "late").exists()
