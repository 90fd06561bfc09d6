"""Five processes of pfl-research at a time on one machine, each with the whole job.

One process of pfl leaves most of a GPU idle, so the rates of five are added up. That is an upper
bound for pfl's own distributed simulation, which divides a cohort among processes and waits for all
of them in every round.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.protocol import peer_arguments

COPIES = 5
SCRIPT = Path(__file__).with_name("pfl_research.py")


def combined(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Add up the rates and the memory of processes that ran at the same time.

    Examples
    --------
    >>> one = {"client_steps_per_second": {"median": 2.0}, "seconds_per_round": 3.0,
    ...        "peak": {"resident_mib": 4.0}, "threads": "1 torch threads, one process"}
    >>> both = combined([one, one])
    >>> both["client_steps_per_second"], both["seconds_per_round"], both["threads"]
    ({'median': 4.0}, 1.5, '2 times 1 torch threads, one process')
    """
    first = results[0]

    def added(name: str) -> dict[str, float]:
        return {key: sum(result[name][key] for result in results) for key in first[name]}

    return {
        **first,
        "client_steps_per_second": added("client_steps_per_second"),
        "peak": added("peak"),
        # Of as many rounds as there are processes.
        "seconds_per_round": max(result["seconds_per_round"] for result in results) / len(results),
        "threads": f"{len(results)} times {first['threads']}",
    }


def main() -> None:
    """Run the processes, and write their common result."""
    arguments = peer_arguments()
    outs = [arguments.out.with_suffix(f".{copy}.json") for copy in range(COPIES)]
    given = ["--job", str(arguments.job), "--device", arguments.device]
    processes = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), *given, "--out", str(out)]
            # The exactness pass of one is enough.
            + (["--no-exact"] if copy or arguments.no_exact else [])
        )
        for copy, out in enumerate(outs)
    ]
    if any([process.wait() for process in processes]):
        sys.exit("a process of pfl failed")
    if not arguments.no_exact:
        shutil.move(outs[0].with_suffix(".pt"), arguments.out.with_suffix(".pt"))
    result = combined([json.loads(out.read_text()) for out in outs])
    arguments.out.write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
