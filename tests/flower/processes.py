"""Real Flower processes on loopback, started on free ports and ended with the test."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

from equipoise.flower import QUIET

BIN = Path(sys.executable).parent
# Set in every process's environment, and searched for at the end: Flower detaches its processes.
MARK = "EQUIPOISE_TEST_MARK"


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def end_with_parent():
    """Make the kernel end this process when the tests are killed; Flower's watch their parent."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def marked(mark):
    """Return the ids of all processes with a mark."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            environment = (entry / "environ").read_bytes()
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if f"{MARK}={mark}".encode() in environment and state != "Z":
            found.append(int(entry.name))
    return found


def command_of(pid):
    try:
        return (Path("/proc") / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


class Flower:
    """A SuperLink and its SuperNodes, each with its own log."""

    def __init__(self, folder, *, tls=None, auth=False, simulation=False, **environment):
        self.folder, self.tls = Path(folder), tls
        self.mark = uuid.uuid4().hex
        self.port = free_port()
        self.processes = {}
        home = self.folder / "flwr-home"
        home.mkdir(parents=True)
        self.environment = {
            **os.environ,
            **QUIET,
            MARK: self.mark,
            "FLWR_HOME": str(home),
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
            # A task is noticed at once, instead of after up to a second.
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.05",
            **environment,
        }
        self.environment.pop("PYTHONPATH", None)
        how = f'root-certificates = "{tls.ca}"\n' if tls else "insecure = true\n"
        (home / "config.toml").write_text(
            '[superlink]\ndefault = "test"\n\n[superlink.test]\naddress = '
            f'"127.0.0.1:{self.port}"\n{how}'
        )
        secure = ["--insecure"]
        if tls:
            secure = [
                f"--ssl-ca-certfile={tls.ca}",
                f"--ssl-certfile={tls.certificate}",
                f"--ssl-keyfile={tls.key}",
            ]
        secure += ["--enable-supernode-auth"] if auth else []
        secure += ["--simulation"] if simulation else []
        self._start(
            "superlink", "flower-superlink", "--host=127.0.0.1", f"--port={self.port}", *secure
        )
        wait_until(lambda: listening(self.port), 60, "the SuperLink to listen")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()

    def _start(self, name, command, *arguments, cwd=None, **environment):
        log = (self.folder / f"{name}.log").open("ab")
        self.processes[name] = subprocess.Popen(
            [str(BIN / command), *arguments],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=self.environment | environment,
            cwd=cwd or self.folder,
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
        log.close()
        return self.processes[name]

    def node(self, name, config, *, key=None):
        """Start a SuperNode."""
        how = ["--root-certificates", str(self.tls.ca)] if self.tls else ["--insecure"]
        how += ["--auth-supernode-private-key", str(key)] if key else []
        text = " ".join(
            f'{k}="{v}"' if isinstance(v, str) else f"{k}={v}" for k, v in config.items()
        )
        return self._start(
            name,
            "flower-supernode",
            f"--superlink=127.0.0.1:{self.port}",
            f"--port={free_port()}",
            *how,
            "--node-config",
            text,
        )

    def begin(self, app, *arguments, name="run", **run_config):
        """Start a run and follow it; the process ends with the run."""
        text = " ".join(f'{key}="{value}"' for key, value in run_config.items())
        return self._start(
            name, "flwr", "run", str(app), "test", "--stream", "--run-config", text, *arguments
        )

    def run(self, app, *arguments, timeout=300, name="run", **run_config):
        """Run to the end."""
        process = self.begin(app, *arguments, name=name, **run_config)
        process.wait(timeout)
        return self.log(name)

    def command(self, *arguments, timeout=60):
        """Run one of Flower's commands and return its output."""
        done = subprocess.run(
            [str(BIN / arguments[0]), *map(str, arguments[1:])],
            env=self.environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        return done.stdout + done.stderr

    def log(self, name):
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def children(self, word, under=None):
        """Return the processes whose command contains a word, optionally below one of ours."""
        pids = [pid for pid in marked(self.mark) if word in command_of(pid)]
        return pids if under is None else [pid for pid in pids if under in ancestors(pid)]

    def stop(self):
        for sig in (signal.SIGTERM, signal.SIGKILL):
            for pid in marked(self.mark):
                send(pid, signal.SIGCONT)
                send(pid, sig)
            deadline = time.monotonic() + 5
            while marked(self.mark) and time.monotonic() < deadline:
                time.sleep(0.1)
        for process in self.processes.values():
            process.wait(10)


def ancestors(pid):
    found = []
    while pid > 1:
        try:
            pid = int((Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            break
        found.append(pid)
    return found


def send(pid, sig):
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, sig)


def listening(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def wait_until(condition, seconds, what):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.1)
    raise AssertionError(f"waited {seconds} s for {what}")
