"""Does to draft workers what can happen to them, under constant load and without Ray, and measures how long streams
pause; then the same beside processes that are as busy and are no drafts.

    python -m bench.chaos.drafts --faults kill stop slow leave --output drafts.json
    python -m bench.chaos.drafts --beside drafts.json

Each fault strikes the draft worker that computes most, for `--seconds`. Its window ends when the process is up again
and every stream goes on. With `--beside` the load and the faults are those of that file, which gets the figures and
what the limits say: the exit code is 1 unless no gap was longer than a second or twice the longest beside no draft,
every text is that of plain decoding, and nothing was refused.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shlex
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from bench.chaos.application import Application, ApplicationError
from bench.chaos.draft_process import BEHIND_RELAY, SHARE_VARIABLE, STRANGER
from bench.chaos.pauses import Window, pauses
from bench.chaos.relay import Way
from bench.chaos.streams import Answer, Case, ConstantLoad, cases, faults_of, plain_answers, streaming
from bench.record import origin
from spool.deploy.cluster.addresses import grpc_address, http_url
from spool.deploy.config.loading import configuration_from
from spool.deploy.config.spool_config import SpoolConfig
from spool.deploy.models import prepare_models
from spool.deploy.processes.supervisor import running_cell
from spool.deploy.processes.task import TASK_VARIABLE, Task
from spool.deploy.progress import Reporter, say
from spool.deploy.workers import cell_workers
from spool.protos import scheduler_pb2, scheduler_pb2_grpc
from spool.scheduler.messages import Role
from spool.services.launch.child_process import ChildGroup, ChildProcess, Command
from spool.services.launch.launcher import WorkerLaunch
from spool.services.launch.process_tuning import compute_environment
from spool.services.rpc.channel_security import SECURITY_VARIABLE, ChannelSecurity, random_token

_PATIENCE = 120.0
_UNDISTURBED_SECONDS = 15.0
_LONG_EVERY = 8
_GAP_SECONDS, _GAP_TIMES = 1.0, 2.0
_DRAFTS = 2
_TURN_SECONDS, _TURN_SHARE = 0.1, 0.1
_WAYS = {
    "cut-to": Way.CUT_TO,
    "cut-from": Way.CUT_FROM,
    "noise": Way.NOISE,
    "wrong": Way.WRONG,
    "broken": Way.BROKEN,
}
FAULTS = ("kill", "stop", "slow", "leave", *_WAYS)
"""SIGKILL; SIGSTOP; SIGSTOP for nine tenths of the time; SIGTERM; and what a relay does."""


@dataclass(frozen=True)
class Plan:
    """What is measured, whether beside drafts or beside processes that are none. Every eighth prompt has
    `prompt_tokens` tokens at random, if there are to be any."""

    faults: list[str]
    seconds: float
    targets: int
    policy: str
    streams: int
    max_tokens: int
    prompt_tokens: int
    settings: dict[str, Any]

    def config(self) -> SpoolConfig:
        def section(name: str, **fields: Any) -> dict[str, Any]:
            return {**fields, **self.settings.get(name, {})}

        plain = {
            **self.settings,
            "models": section("models", draft_in="workers"),
            "scheduling": section("scheduling", policy=self.policy),
            "groups": section("groups", target={"replicas": self.targets}, draft={"replicas": _DRAFTS}),
            "metrics": section("metrics", scheduler_address=None),
            "gateway": section("gateway", port=8300, grpc_port=8301),
        }
        return configuration_from(plain).on_one_machine()

    def cases(self) -> list[Case]:
        asked = cases(self.streams, self.max_tokens)
        draw = random.Random(1)
        for place in range(0, self.streams if self.prompt_tokens else 0, _LONG_EVERY):
            prompt = tuple(draw.randrange(100, 40_000) for _ in range(self.prompt_tokens))
            asked[place] = Case(prompt, place, 0.8 * (place % 2), self.max_tokens)
        return asked


@dataclass
class Ups:
    """How often each process was ready; a Progress."""

    counts: Counter[str] = field(default_factory=Counter)

    def __call__(self, name: str, message: str, fraction: float | None) -> None:
        if message == "up":
            self.counts[name] += 1
        elif fraction is None:
            say(f"{name}: {message}")


@dataclass
class Cell:
    """A served application, and its draft workers or the processes in their place."""

    config: SpoolConfig
    folder: Path
    group: ChildGroup
    scheduler_address: str
    security: ChannelSecurity
    ups: Ups
    drafts: list[ChildProcess] = field(default_factory=list)

    @property
    def application(self) -> Application:
        config = self.config
        return Application(http_url(config), grpc_address(config) or "", config.served_name, os.getpid(), os.environ)

    async def start_drafts(self, launches: list[WorkerLaunch], kind: str, shares: list[float]) -> None:
        for launch, share in zip(launches, shares or [0.0] * len(launches), strict=True):
            task = Task(
                launch.name,
                str(self.folder),
                self.config.plain(),
                role=launch.role.value,
                engine=dict(launch.settings),
            )
            variables = {
                **compute_environment(launch.threads, self.config.engine.cpu_isa),
                TASK_VARIABLE: task.to_json(),
                SECURITY_VARIABLE: self.security.to_json(),
                SHARE_VARIABLE: str(share),
            }
            module = ("spool.deploy.processes", "worker") if not kind else ("bench.chaos.draft_process", kind)
            command = Command(module[0], [module[1], launch.name], variables)
            log = self.folder / f"{launch.name}.log"
            self.drafts.append(ChildProcess(launch.name, partial(_always, command), log, self.ups))
        await self.group.start(*self.drafts)

    def processor_seconds(self) -> list[float]:
        """That the drafts' processes have used since they were started."""
        times = [psutil.Process(draft.process_id).cpu_times() for draft in self.drafts]
        return [one.user + one.system for one in times]

    async def busiest(self) -> ChildProcess:
        before = self.processor_seconds()
        await asyncio.sleep(1.0)
        used = [after - earlier for earlier, after in zip(before, self.processor_seconds(), strict=True)]
        return self.drafts[used.index(max(used))]

    async def proposed(self) -> dict[str, int]:
        """Tokens proposed and accepted since the start."""
        async with self.security.open_channel(self.scheduler_address) as channel:
            stub = scheduler_pb2_grpc.SchedulerStub(channel)
            status = await stub.Status(scheduler_pb2.StatusRequest(), metadata=self.security.metadata)
        return {"drafted": status.speculation.draft_tokens, "accepted": status.speculation.accepted_tokens}


@asynccontextmanager
async def serving(plan: Plan, kind: str, shares: list[float]) -> AsyncIterator[Cell]:
    """With draft workers if `kind` is empty, else with processes of this kind (draft_process.py) in their place."""
    async with AsyncExitStack() as running:
        folder = Path(running.enter_context(tempfile.TemporaryDirectory(prefix="spool-chaos-")))
        config, security, ups = plan.config(), ChannelSecurity(token=random_token()), Ups()
        prepare_models(config, Reporter())
        workers = cell_workers(config)
        targets, drafts = ([one for one in workers if one.role is role] for role in (Role.TARGET, Role.DRAFT))
        group, address = await running.enter_async_context(running_cell(config, targets, security, folder, ups))
        cell = Cell(config, folder, group, address, security, ups)
        await cell.start_drafts(drafts, kind, shares)
        yield cell


def _always(command: Command, port: int) -> Command:
    return command


@contextmanager
def _slowed(process_id: int) -> Iterator[None]:
    """The process runs for a tenth of the time."""

    async def take_turns() -> None:
        while True:
            os.kill(process_id, signal.SIGSTOP)
            await asyncio.sleep(_TURN_SECONDS * (1 - _TURN_SHARE))
            os.kill(process_id, signal.SIGCONT)
            await asyncio.sleep(_TURN_SECONDS * _TURN_SHARE)

    turns = asyncio.create_task(take_turns())
    try:
        yield
    finally:
        turns.cancel()
        os.kill(process_id, signal.SIGCONT)


@contextmanager
def _stopped(process_id: int) -> Iterator[None]:
    os.kill(process_id, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(process_id, signal.SIGCONT)


async def strike(cell: Cell, fault: str, seconds: float, load: ConstantLoad) -> Window:
    victim = await cell.busiest()
    ups = cell.ups.counts[victim.name]
    begin = time.monotonic()
    match fault:
        case "kill" | "leave":
            os.kill(victim.process_id, signal.SIGKILL if fault == "kill" else signal.SIGTERM)
            await _until(lambda: cell.ups.counts[victim.name] > ups, f"another process {victim.name}")
            await asyncio.sleep(max(0.0, begin + seconds - time.monotonic()))
        case "stop":
            with _stopped(victim.process_id):
                await asyncio.sleep(seconds)
        case "slow":
            with _slowed(victim.process_id):
                await asyncio.sleep(seconds)
        case "none":
            await asyncio.sleep(seconds)
        case _:
            file = cell.folder / f"{victim.name}.way"
            file.write_text(_WAYS[fault].name, encoding="utf-8")
            await asyncio.sleep(seconds)
            file.unlink()
    healed = time.monotonic()
    open_then = [one for one in load.records if not one.ended]
    await _until(
        lambda: all(one.ended or (one.arrivals and one.arrivals[-1] > healed) for one in open_then),
        "every stream goes on",
    )
    return Window(begin, time.monotonic())


async def _until(holds: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + _PATIENCE
    while not holds():
        if time.monotonic() > end:
            raise ApplicationError(f"{what}: not within {_PATIENCE:g} s")
        await asyncio.sleep(0.02)


async def measure(plan: Plan, beside: list[float] | None) -> dict[str, Any]:
    """Beside draft workers, or beside processes that use `beside` of a core each and are no drafts. The answers of the
    latter are not compared."""
    relayed = any(fault in _WAYS for fault in plan.faults)
    kind = STRANGER if beside is not None else BEHIND_RELAY if relayed else ""
    # What a relay does makes no difference to those that nobody asks.
    struck = [fault for fault in plan.faults if beside is None or fault not in _WAYS]
    figures: list[dict[str, Any]] = []
    async with serving(plan, kind, beside or []) as cell, streaming(cell.application) as client:
        asked = plan.cases()
        expected: Mapping[Case, Answer] = {} if beside is not None else await plain_answers(client, asked)
        windows: list[tuple[str, Window, dict[str, float]]] = []
        async with ConstantLoad(client, asked, plan.streams) as load:
            await _until(
                lambda: sum(bool(one.arrivals) for one in load.records[: plan.streams]) == plan.streams,
                "every stream has begun",
            )
            await asyncio.sleep(3.0)
            for fault in ("none", *struck):
                used, before = cell.processor_seconds(), await cell.proposed()
                seconds = min(plan.seconds, _UNDISTURBED_SECONDS) if fault == "none" else plan.seconds
                window = await strike(cell, fault, seconds, load)
                after = await cell.proposed()
                more = {name: float(count - before[name]) for name, count in after.items()}
                if fault == "none":
                    now = cell.processor_seconds()
                    shares = [(end - begin) / window.seconds for begin, end in zip(used, now, strict=True)]
                windows.append((fault, window, more))
                say(f"{fault}: {window.seconds:.1f} s, {more}")
        figures = [{"fault": fault} | pauses(load.records, window) | more for fault, window, more in windows]
    return {
        "streams": {"at_once": plan.streams, "answered": sum(one.answered for one in load.records)},
        "tokens": sum(one.tokens for one in load.records),
        "refused": sum(one.refused for one in load.records),
        "wrong": faults_of(load.records, expected) if expected else [one.error for one in load.records if one.error],
        "processor_shares": shares,
        "faults": figures,
    }


def limits(drafts: Mapping[str, Any], beside: Mapping[str, Any]) -> dict[str, bool]:
    control = {one["fault"]: one["longest"] for one in beside["faults"]}
    found = {
        "no text differs from plain decoding": not drafts["wrong"],
        "nothing is refused": not drafts["refused"],
    }
    for one in drafts["faults"]:
        allowed = max(_GAP_SECONDS, _GAP_TIMES * control.get(one["fault"], control["none"]))
        found[f"{one['fault']}: {one['longest']:.2f} s, at most {allowed:.2f} s"] = one["longest"] <= allowed
    return found


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=[])
    parser.add_argument("--beside", type=Path, metavar="FILE", help="do what was done for FILE beside no drafts")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each fault")
    parser.add_argument("--targets", type=int, default=1)
    parser.add_argument("--policy", default="ragged", help="ragged always drafts")
    parser.add_argument("--streams", type=int, default=32, help="at once")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument(
        "--prompt-tokens", type=int, default=0, help="of every eighth prompt, at random; 0: none is long"
    )
    parser.add_argument("--settings", type=json.loads, default={}, help="sections of spool.yaml, as JSON")
    parser.add_argument("--output", type=Path, default=Path("drafts.json"))
    asked = vars(parser.parse_args(argv))
    file, beside = asked.pop("output"), asked.pop("beside")
    command = shlex.join(["python", "-m", "bench.chaos.drafts", *argv])
    try:
        if beside is None:
            plan = Plan(**asked)
            result: dict[str, Any] = origin(command) | {
                "plan": asdict(plan),
                "drafts": asyncio.run(measure(plan, None)),
            }
            holds = not result["drafts"]["wrong"]
        else:
            file, result = beside, json.loads(beside.read_text(encoding="utf-8"))
            result["command_beside"] = command
            result["beside"] = asyncio.run(measure(Plan(**result["plan"]), result["drafts"]["processor_shares"]))
            result["limits"] = limits(result["drafts"], result["beside"])
            holds = all(result["limits"].values())
    except (ApplicationError, RuntimeError) as error:
        print(f"bench.chaos.drafts: {error}", file=sys.stderr)
        return 1
    file.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result.get("limits", result["drafts"]["faults"]), indent=2))
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
