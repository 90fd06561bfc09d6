"""How values from clients are shown in messages."""

from __future__ import annotations

from equipoise.flower.checks import shown


def test_what_clients_send_is_shown_on_one_short_line():
    assert shown("a\nb\x1b[31m\u202e\ud800") == r"a\nb\x1b[31m\u202e\ud800"
    assert shown("x" * 10**7) == "x" * 77 + "..."
    assert shown(list(range(10**6))) == "a list of 1000000 values"
    assert shown(10**5000) == "a number of more than 60 digits"
