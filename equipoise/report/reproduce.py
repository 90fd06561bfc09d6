"""The section with configurations, and how to reproduce the runs."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import yaml

from equipoise.data import SOURCES
from equipoise.report.html import Section, details, listing, paragraph
from equipoise.report.reading import RunRecord
from equipoise.text import plural


def of_runs(records: Sequence[RunRecord]) -> Section:
    """Return configurations, and how to reproduce the runs."""
    body = ""
    for record in records[:1]:
        resolved = record.config["resolved"]
        body += paragraph(
            f"Equipoise {resolved.get('equipoise', '?')}, PyTorch {resolved.get('torch', '?')}, on "
            f"{resolved.get('device', '?')} with "
            f"{plural(int(resolved.get('threads', 1)), 'thread')}. The same versions, device, "
            "number of threads and configuration give the same numbers."
        )
    for record in records:
        known = record.config["data"]["name"] in SOURCES or record.config.get("imports")
        command = f"equipoise run {record.directory}/config.yaml --out NEW"
        if known:
            how = f'<pre class="command"><code>{escape(command)}</code></pre>'
        else:
            how = paragraph(
                "The run was started from Python with custom data. To reproduce it, use the same "
                f"data: their fingerprint is "
                f"{record.config['resolved'].get('fingerprint', 'unknown')}."
            )
        written = yaml.safe_dump(record.config, sort_keys=False, allow_unicode=True)
        title = f"Configuration of {record.directory}"
        body += how + details(title, listing(title, written))
    return Section("reproduce", "Configuration and how to reproduce", body)
