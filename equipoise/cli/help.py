"""Help of commands."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand


class Command(TyperCommand):
    """A command whose help does not show the backslashes that Typer adds for rich."""

    def get_help(self, ctx: Any) -> str:
        """Return the help."""
        return super().get_help(ctx).replace(r"\[", "[")
