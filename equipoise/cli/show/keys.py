"""Keys of experiments and studies."""

from __future__ import annotations

from collections.abc import Sequence

from rich.padding import Padding
from rich.text import Text

from equipoise.cli.show.console import new_console
from equipoise.explain import Setting


def show_keys(found: Sequence[Setting]) -> None:
    """Print keys with their types, defaults, meanings and examples."""
    console = new_console()
    for setting in found:
        of = f" (with {setting.of})" if setting.of else ""
        usual = f"default {setting.default}" if setting.default else "no default"
        default = "needed" if setting.default is None else usual
        kind = setting.kind
        if not any(other.key.startswith(f"{setting.key}.") for other in found):
            kind = kind.replace("see below", f"see equipoise explain {setting.key}")
        console.print(
            Text(setting.key, style="bold") + Text(f"{of}: {kind}; {default}"),
            soft_wrap=True,
        )
        console.print(Padding(Text(setting.meaning.replace("`", "")), (0, 0, 0, 4), expand=False))
        if setting.example:
            console.print(f"    example: {setting.example}", soft_wrap=True)
