"""`spool status` and `spool down`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from typing import Any

import grpc

from spool.deploy.assembly.plain_message import plain_message
from spool.deploy.cluster.client import application_state, connected, scheduler_statuses, stop_application
from spool.deploy.cluster.local_ray import stop_ray
from spool.deploy.cluster.served_state import Served, StateFolder
from spool.deploy.errors import RunError
from spool.deploy.progress import say
from spool.protos import scheduler_pb2, scheduler_pb2_grpc
from spool.services.rpc.channel_security import ChannelSecurity

_CALL_SECONDS = 10.0


def status(app_name: str, json_output: bool) -> int:
    """Prints replicas, sequences and groups. Raises RunError where nothing is served."""
    state = StateFolder()
    served = find_served(app_name, state)
    application, cells = _state_of(served, state)
    if json_output:
        addresses = {"http": served.http_url, "grpc": served.grpc_address, "ray": served.ray_address}
        summary = {"application": app_name, "model": served.model, "addresses": addresses}
        print(json.dumps(summary | application | {"cells": cells}), flush=True)
        return 0
    print(f"{app_name}: {application['status']}, {served.model} at {served.http_url}")
    for name, deployment in application["deployments"].items():
        replicas = ", ".join(f"{count} {state.lower()}" for state, count in deployment["replicas"].items())
        print(f"{name}: {deployment['status'].lower()}, replicas: {replicas or 'none'}")
    for number, cell in enumerate(cells, 1):
        if len(cells) > 1:
            print(f"cell {number}")
        for line in ["the scheduler does not answer"] if cell is None else _lines(cell):
            print(f"  {line}")
    return 0


def _state_of(served: Served, state: StateFolder) -> tuple[dict[str, Any], list[dict[str, Any] | None]]:
    """What Serve knows, and what the scheduler of each cell says. Without Ray there is one, and no deployments."""
    if served.ray_address is None:
        security = ChannelSecurity.from_json(served.scheduler_security or "{}")
        application = {"status": "RUNNING", "message": "", "deployments": {}}
        return application, [asyncio.run(_scheduler_status(served.scheduler_address or "", security))]
    # The folder holds the token of a Ray of Spool's own.
    with connected(served.ray_address, state if served.process_id is not None else None):
        application = application_state(served.app_name)
        return application, scheduler_statuses(served.app_name, application)


async def _scheduler_status(address: str, security: ChannelSecurity) -> dict[str, Any] | None:
    """What the scheduler of a cell without Ray says of itself; None while it does not answer."""
    async with security.open_channel(address) as channel:
        call = scheduler_pb2_grpc.SchedulerStub(channel).Status
        try:
            reply = await call(scheduler_pb2.StatusRequest(), timeout=_CALL_SECONDS, metadata=security.metadata)
        except grpc.aio.AioRpcError:
            return None
    return plain_message(reply)


def down(app_name: str) -> int:
    """Stops what `spool serve` started, and nothing else; where there is nothing, that is no error."""
    state = StateFolder()
    served = state.read(app_name)
    if served is None or not is_there(served, state):
        state.forget(app_name)
        say(f"{app_name} is not served, there is nothing to stop")
        return 0
    if served.process_id is not None:
        stop_ray(app_name, served.process_id, state)
    else:
        with connected(served.ray_address or "auto", None):
            stop_application(app_name, served.started_serve)
    state.forget(app_name)
    say(f"{app_name} is stopped")
    return 0


def find_served(app_name: str, state: StateFolder) -> Served:
    """Raises RunError where nothing is served by that name."""
    served = state.read(app_name)
    if served is None or not is_there(served, state):
        raise RunError(f"{app_name} is not served here (`spool serve` starts it)")
    return served


def is_there(served: Served, state: StateFolder) -> bool:
    """Whether it is still served, as far as can be known without Ray's help."""
    return served.process_id is None or state.is_alive(served.app_name)


def _lines(scheduler: Mapping[str, Any]) -> Iterator[str]:
    """Of each worker, and of the scheduler."""
    for worker in scheduler["workers"]:
        state = _short(worker["state"], "WORKER_STATE_")
        used = worker["total_pages"] - worker["free_pages"]
        parts = [f"{state}: {worker['reason']}" if worker["reason"] else state, worker["device"]]
        parts += [worker["quantization"], _version(worker), f"{worker['sequences']} sequences"]
        parts.append(f"{used} of {worker['total_pages']} pages in use" if worker["total_pages"] else "")
        if worker["role"] == "ROLE_DRAFT":
            parts.append(f"busy {worker['busy_share']:.0%} of the time, {worker['queued']} sequences wait for it")
        yield f"{worker['worker_id']}: {', '.join(filter(None, parts))}"
    live_set, groups, throughput = scheduler["live_set"], scheduler["groups"], scheduler["throughput"]
    yield from (f"{gateway['gateway_id']}: gateway, {_version(gateway)}" for gateway in scheduler.get("gateways", ()))
    state = _short(scheduler["state"], "SCHEDULER_STATE_")
    yield f"scheduler: {state}, {_version(scheduler)}, {scheduler['sessions']} gateways"
    yield f"sequences: {live_set['live']}, {live_set['waiting']} waiting, {live_set['max_running']} may run at a time"
    yield f"groups: {groups['groups']}, {groups['mean_size']:.1f} of {groups['batch_size']} rows on average"
    yield f"tokens: {throughput['tokens']}, {throughput['tokens_per_second']:.1f} a second"
    yield f"accepted: {throughput['acceptance_rate']:.1%} of the drafted tokens{_by_source(scheduler)}"
    yield f"ended: {throughput['finished']} sequences finished, {throughput['failed']} failed"
    yield from (f"drafting: {choice['explanation']}" for choice in scheduler["drafting"])
    if scheduler["replicas"] is not None:
        yield f"autoscaling: {scheduler['replicas']['explanation']}"


def _by_source(scheduler: Mapping[str, Any]) -> str:
    """The same of each who proposed; a scheduler of protocol version 21 does not tell."""
    sources = [
        f"{_short(one['source'], 'PROPOSAL_SOURCE_')} {int(one['accepted_tokens']) / int(one['draft_tokens']):.1%}"
        for one in (scheduler.get("speculation") or {}).get("sources", ())
    ]
    return f" ({', '.join(sources)})" if sources else ""


def _version(process: Mapping[str, Any]) -> str:
    """Of its software; one of protocol version 20 does not tell it, and on Ray such a scheduler has no field for it."""
    return f"version {process.get('version') or '-'}"


def _short(name: str, prefix: str) -> str:
    return name.removeprefix(prefix).lower().replace("_", " ")
