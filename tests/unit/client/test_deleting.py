"""Deleting: what is not there is said to be missing, what is there is deleted once, whatever answer was lost."""

from __future__ import annotations

import msgspec
import pytest

from joynexus import JoyNexusError
from joynexus.client import Client
from joynexus.wire import Message, Packet
from joynexus.wire.errors import ErrorCode, failure
from joynexus.wire.front import (
    DatasetInfo,
    DeleteDataset,
    DeletePolicy,
    DeleteVersion,
    Done,
    GetDataset,
    GetPolicy,
    GetVersion,
    VersionInfo,
)
from tests.unit.client import test_cli_verbs
from tests.unit.client.service import FakeService
from tests.unit.client.test_cli_verbs import Run
from tests.unit.client.test_connection import INFO

joynexus, service = test_cli_verbs.joynexus, test_cli_verbs.service
VERSION = VersionInfo(version=3, digest="d" * 64, nbytes=1, step=0)


@pytest.fixture(autouse=True)
def there(service: FakeService) -> None:
    """A policy `p` with version 3, and a data set `demos`; anything else is not there."""
    ordinary = service.answer

    def answer(packet: Packet) -> list[Message]:
        match packet.message:
            case GetPolicy(policy="p"):
                return [INFO]
            case GetVersion(policy="p", version=3):
                return [VERSION]
            case GetDataset(dataset="demos"):
                return [DatasetInfo(dataset="demos", state="ready")]
            case GetPolicy() | GetVersion() | GetDataset():
                return [failure(ErrorCode.NOT_FOUND, "there is none here")]
            case DeletePolicy() | DeleteVersion() | DeleteDataset():
                return [Done()]
            case _:
                return ordinary(packet)

    service.answer = answer


def deleted(service: FakeService) -> list[Message]:
    kinds = (DeletePolicy, DeleteVersion, DeleteDataset)
    return [packet.message for packet in service.heard if isinstance(packet.message, kinds)]


def test_each_is_deleted_by_name(joynexus: Run, service: FakeService) -> None:
    assert joynexus("policies", "delete", "p") == ["deleted policy 'p'"]
    assert joynexus("policies", "delete", "p", "--version", "3") == ["deleted version 3 of policy 'p'"]
    assert joynexus("datasets", "delete", "demos") == ["deleted data set 'demos'"]
    assert deleted(service) == [
        DeletePolicy(policy="p"), DeleteVersion(policy="p", version=3), DeleteDataset(dataset="demos")
    ]  # fmt: skip


@pytest.mark.parametrize(
    "command", [["policies", "delete", "q"], ["policies", "delete", "p", "--version", "9"], ["datasets", "delete", "x"]]
)
def test_a_word_that_names_nothing_is_an_error_and_deletes_nothing(
    joynexus: Run, service: FakeService, command: list[str]
) -> None:
    assert any("there is none here" in line for line in joynexus(*command, code=1))
    assert deleted(service) == []


def test_the_list_of_policies_is_still_what_the_word_alone_gives(joynexus: Run) -> None:
    assert any("trainer-2" in line for line in joynexus("policies"))
    assert msgspec.json.decode("\n".join(joynexus("policies", "--json")))


def test_a_refusal_is_raised_as_it_is_told(service: FakeService) -> None:
    from joynexus import connect

    sentence = "a loop drives policy 'p': end that first"
    ordinary = service.answer
    service.answer = lambda packet: (
        [failure(ErrorCode.CONFLICT, sentence)] if isinstance(packet.message, DeletePolicy) else ordinary(packet)
    )
    client: Client
    with connect(service.cluster) as client, pytest.raises(JoyNexusError, match="a loop drives") as caught:
        client.delete_policy("p")
    assert caught.value.code is ErrorCode.CONFLICT
