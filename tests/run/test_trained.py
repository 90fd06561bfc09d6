"""Which client is meant by a number or a name."""

from __future__ import annotations

import re

import numpy as np
import pytest

from equipoise.errors import InputError
from equipoise.run.trained import client_number


@pytest.mark.parametrize(
    ("client", "names", "message"),
    [
        (
            1,
            ("1", "2"),
            "number 1 is called '2', and '1' is number 0; pass client='1' or client='2'",
        ),
        (
            4,
            ("0", "1", "2", "3", "5"),
            "number 4 is called '5', and no client is called '4'; pass client='5'",
        ),
        (
            0,
            ("north", "0"),
            "number 0 is called 'north', and '0' is number 1; pass client='0' or client='north'",
        ),
    ],
)
def test_a_number_that_may_be_another_clients_name_is_refused(client, names, message):
    with pytest.raises(InputError, match=re.escape(f"client {client} is ambiguous: {message}")):
        client_number(client, names)


@pytest.mark.parametrize(
    ("client", "names", "number"),
    [
        (None, ("1", "0"), None),
        # No client has this number, so it is a name.
        (2, ("1", "2"), 1),
        (100, ("100", "200"), 0),
        (-1, ("0", "-1"), 1),
        (1, None, 1),
        (1, ("north", "south"), 1),
        (5, ("north", "south"), 5),
        (5, ("0", "1"), 5),
        (1, ("2", "1", "0"), 1),
        (1, ("00", "01"), 1),
        (0, ("1", "1"), 0),
    ],
)
def test_a_number_that_cannot_be_mistaken_is_taken_as_it_is(client, names, number):
    assert client_number(client, names) == number


@pytest.mark.parametrize("client", [True, 1.0, np.float32(1), np.bool_(True), [1]], ids=repr)
def test_what_is_neither_a_number_nor_a_name_is_no_client(client):
    with pytest.raises(
        InputError, match=re.escape(f"client {client!r} is not a client; pass its number")
    ):
        client_number(client, ("0", "1"))
