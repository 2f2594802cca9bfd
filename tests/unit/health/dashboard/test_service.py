"""Where the dashboard listens, and how it is reached."""

from __future__ import annotations

import socket

import pytest

from services.health.dashboard.service import default_url, listen


def test_port_that_is_taken_is_told_in_a_sentence() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(ValueError, match=r"the dashboard cannot listen at '127.0.0.1:\d+': .*; set JOYNEXUS_LISTEN"),
    ):
        listen(f"127.0.0.1:{taken.getsockname()[1]}")


@pytest.mark.parametrize("where", ["nowhere", "127.0.0.1:", "127.0.0.1:99999999", "127.0.0.1", ":-1"])
def test_address_without_sense_is_told_in_a_sentence(where: str) -> None:
    with pytest.raises(ValueError, match=r"set JOYNEXUS_LISTEN=HOST:PORT"):
        listen(where)


def test_who_listens_everywhere_is_reached_by_the_loopback() -> None:
    assert default_url("0.0.0.0:5714") == "http://127.0.0.1:5714"
    assert default_url("[::]:5714") == "http://127.0.0.1:5714"
    assert default_url("10.0.0.7:80") == "http://10.0.0.7:80"
