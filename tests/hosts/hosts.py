"""Hosts with addresses of their own on this machine: namespaces of Linux, joined by a switch. They take root, iproute2.

A host has a network, process ids, a name, shared memory and a folder for Ray of its own; files are the machine's.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from tests.support.waiting import wait_until

MACHINE = "10.77.0.1"
"""This machine's own address on the network."""

_OWN_SPACES = ("--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc")
_OWN_DEVICE = "spool-1"
_SPACES = Path("/run/netns")
_RAY_FOLDER = "/tmp/ray"  # where Ray keeps its files unless it is told otherwise


def missing() -> str:
    """What this machine lacks for hosts of their own; empty where it lacks nothing."""
    programs = [name for name in ("ip", "ss", "unshare") if shutil.which(name) is None]
    if programs:
        return f"{' and '.join(programs)} not installed"
    inside = "mount -t tmpfs tmpfs /dev/shm && ip tuntap add spool mode tap"
    script = f"""
        ip netns add spool-tried || exit
        ip netns exec spool-tried unshare {" ".join(_OWN_SPACES)} sh -c {shlex.quote(inside)}
        ip netns delete spool-tried
    """
    return subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=False).stderr.strip()


class Network:
    """The switch that joins hosts and this machine; one at a time."""

    def __init__(self, hosts: list[Host]) -> None:
        self._hosts = hosts

    @contextmanager
    def running(self) -> Iterator[None]:
        """With every host on it, not started. At the end hosts and network are gone."""
        _clear()
        Path(_RAY_FOLDER).mkdir(exist_ok=True)
        names = [_OWN_DEVICE, *(host.device for host in self._hosts)]
        command = [sys.executable, "-m", "tests.hosts.switch", *names]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as switch:
            try:
                assert switch.stdin is not None
                assert switch.stdout is not None
                self._lines = switch.stdin
                assert switch.stdout.readline() == "ready\n"
                _run("ip", "address", "add", f"{MACHINE}/24", "dev", _OWN_DEVICE)
                _run("ip", "link", "set", _OWN_DEVICE, "up")
                for host in self._hosts:
                    host.join()
                yield
            finally:
                _clear()
                switch.kill()

    @contextmanager
    def disturbed(
        self, *hosts: Host, delay: float = 0.0, lost_to: float = 0.0, lost_from: float = 0.0
    ) -> Iterator[None]:
        """For the length of the block, every packet to and from these hosts is late by `delay` seconds, or lost with
        the probability of its direction, of which nobody is told."""
        self._change(hosts, delay, lost_to, lost_from)
        try:
            yield
        finally:
            self._change(hosts, 0.0, 0.0, 0.0)

    def _change(self, hosts: tuple[Host, ...], *numbers: float) -> None:
        self._lines.writelines(f"{host.device} {' '.join(map(str, numbers))}\n" for host in hosts)
        self._lines.flush()


class Host:
    """A host that runs one command, and starts it again whenever it ends, as a kubelet does."""

    def __init__(
        self,
        name: str,
        number: int,
        folder: Path,
        command: list[str],
        environment: Mapping[str, str],
        after: tuple[str, int] | None = None,
    ) -> None:
        """ADDRESS in the command becomes the host's own. With `after` it begins when somebody listens there."""
        self.name = name
        self.address = f"10.77.0.{number}"
        self.device = f"spool-{number}"
        self._space = f"spool-{name}"
        self._folder = folder / name
        self._command = [word.replace("ADDRESS", self.address) for word in command]
        self._environment = {**os.environ, **environment, "HOME": str(self._folder)}
        self._after = after
        self._first: subprocess.Popen[bytes] | None = None

    def join(self) -> None:
        """Its device, which is there, becomes its network."""
        (self._folder / "ray").mkdir(parents=True)
        _run("ip", "netns", "add", self._space)
        _run("ip", "link", "set", self.device, "netns", self._space)
        for command in (
            f"address add {self.address}/24 dev {self.device}",
            f"link set {self.device} up",
            "link set lo up",
            f"route add default via {MACHINE}",
        ):
            _run("ip", "-n", self._space, *command.split())

    def start(self) -> None:
        if self._after is not None:
            address = self._after
            wait_until(lambda: _listened_to(address), f"a listener at {address}")
        script = f"""
            hostname {self.name}
            mount -t tmpfs tmpfs /dev/shm
            mount --bind {self._folder / "ray"} {_RAY_FOLDER}
            while true; do {shlex.join(self._command)}; sleep 1; done
        """
        with (self._folder / "output.log").open("ab") as log:
            self._first = subprocess.Popen(
                ["ip", "netns", "exec", self._space, "unshare", *_OWN_SPACES, "sh", "-c", script],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment,
            )

    def kill(self) -> None:
        """Ends every process of the host at once."""
        assert self._first is not None
        processes = self.processes()
        self._first.kill()
        self._first.wait()
        psutil.wait_procs(processes)

    def processes(self, name: str = "") -> list[psutil.Process]:
        """Those of this host with `name` on their command line."""
        space = (_SPACES / self._space).stat().st_ino
        found = []
        for process in psutil.process_iter():
            try:
                own = re.search(r"\d+", os.readlink(f"/proc/{process.pid}/ns/net"))
                if own is not None and int(own[0]) == space and name in " ".join(process.cmdline()):
                    found.append(process)
            except (OSError, psutil.Error):
                continue
        return found

    def listening(self, name: str) -> list[str]:
        """Where processes with `name` on their command line listen, for others on the network."""
        shown = _run(
            "ip", "netns", "exec", self._space, "ss", "--no-header", "--listening", "--tcp", "--processes", "-n"
        )
        numbers = [process.pid for process in self.processes(name)]
        lines = [line for line in shown.splitlines() if any(f"pid={number}," in line for number in numbers)]
        ports = {line.split()[3].rpartition(":")[2] for line in lines if "127.0.0.1" not in line.split()[3]}
        return [f"{self.address}:{port}" for port in sorted(ports)]


def _clear() -> None:
    """Ends all hosts, those of a run that was killed as well."""
    for space in _SPACES.glob("spool-*"):
        found = subprocess.run(["ip", "netns", "pids", space.name], capture_output=True, text=True, check=True)
        for number in found.stdout.split():
            with suppress(psutil.Error):
                process = psutil.Process(int(number))
                process.kill()
                process.wait()
        _run("ip", "netns", "delete", space.name)


def _listened_to(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address, timeout=1).close()
    except OSError:
        return False
    return True


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
