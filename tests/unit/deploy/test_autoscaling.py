"""Autoscaling: the control law, its behaviour in a closed loop of load and replicas, and what Serve is given."""

from __future__ import annotations

import importlib
import math
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.serve._private.deploy_utils import get_app_code_version
from ray.serve.config import AutoscalingConfig
from ray.serve.schema import ServeApplicationSchema, ServeDeploySchema

from spool.deploy.autoscaling.control import GroupControl
from spool.deploy.autoscaling.policy import OPEN_REQUESTS, FollowScheduler
from spool.deploy.autoscaling.reporter import Autoscaler
from spool.deploy.config.loading import configuration_from, load_configuration
from spool.deploy.config.placement import WorkerAutoscaling
from spool.deploy.ray_app.application import settled
from spool.deploy.ray_app.serve_options import replica_options, serve_content
from spool.scheduler.config import SchedulerConfig
from spool.scheduler.core import SchedulerCore
from spool.scheduler.messages import Role
from spool.scheduler.statistics import WorkerSnapshot
from spool.services.scheduler.workers.draft_load import DraftLoad

PACE = {"upscale_delay_seconds": 10.0, "downscale_delay_seconds": 60.0}
RULES = WorkerAutoscaling(max_replicas=5, **PACE)
START_SECONDS = 20


# --- the control law --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loads", "in_use", "begin", "end", "replicas"),
    [
        # Load 2 at 85 % needs 2.35 replicas, after the upscale delay.
        (lambda _: 2.0, 1, 0, 10, 1),
        (lambda _: 2.0, 1, 10, 30, 3),
        # Load 1 at 65 % needs 1.54 replicas, after the cool-down.
        (lambda time: 3.0 if time < 30 else 1.0, 1, 29.5, 89.5, 4),
        (lambda time: 3.0 if time < 30 else 1.0, 1, 90.5, 120, 2),
        # A peak shorter than the delay adds nothing, a lull shorter than the cool-down removes nothing.
        (lambda time: 4.0 if time % 20 < 9 else 0.5, 1, 0, 300, 1),
        (lambda time: 3.0 if time % 60 < 15 else 0.0, 1, 20, 600, 4),
        # A load between the two thresholds keeps any number.
        (lambda _: 1.6, 2, 0, 300, 2),
        (lambda _: 1.6, 3, 0, 300, 3),
    ],
)
def test_the_number_wanted_in_a_time(
    loads: Callable[[float], float], in_use: int, begin: float, end: float, replicas: int
) -> None:
    """By decisions of two a second."""
    control = GroupControl()
    times = [tick / 2 for tick in range(int(2 * end))]
    numbers = {time: control.decide(loads(time), in_use, RULES, time).wanted for time in times}
    assert {number for time, number in numbers.items() if time >= begin} == {replicas}


@given(st.lists(st.tuples(st.floats(0, 1e9), st.integers(0, 20)), min_size=1, max_size=40), st.integers(1, 9))
def test_bounds_hold_for_any_load(loads: list[tuple[float, int]], highest: int) -> None:
    control = GroupControl()
    for tick, (load, in_use) in enumerate(loads):
        decision = control.decide(load, in_use, RULES, 5.0 * tick, highest)
        assert 1 <= decision.at_least <= decision.wanted <= decision.at_most <= min(5, highest)


# --- the closed loop --------------------------------------------------------------------------------------------------


class Loop:
    """Clients that send one request after the other to targets and drafts that take a while to start.

    Each second it computes the seconds of a round from the numbers of sequences and replicas, and from these the share
    of time in which drafts are busy. A target's step takes 80 ms and 1 ms a row, a draft's pass 10 ms and 2 ms a row.
    """

    def __init__(self, draft_length: int, max_targets: int = 32) -> None:
        self._draft_length = draft_length
        self._autoscaler = Autoscaler(SchedulerConfig(max_running=8))
        target, draft = {"max_replicas": max_targets, **PACE}, {"max_replicas": 8, **PACE}
        self._autoscaler.set_rules({"target": target, "draft": draft})
        self._empty = SchedulerCore(SchedulerConfig()).snapshot()
        self.replicas = {Role.TARGET: 1, Role.DRAFT: 1}
        self._starting: dict[Role, deque[int]] = {role: deque() for role in Role}
        self._second, self._busy, self._load = 0, 0.0, DraftLoad()

    def run(self, clients: int, seconds: int) -> dict[Role, int]:
        """The largest numbers of replicas asked for in that time."""
        asked = dict(self.replicas)
        for _ in range(seconds):
            self._second += 1
            for role, starting in self._starting.items():
                while starting and starting[0] <= self._second:
                    starting.popleft()
                    self.replicas[role] += 1
            core, now = self._snapshot(clients), float(self._second)
            self._load.hear(1, self._busy, 0, now)
            drafts = [self._load.busy_share] * self.replicas[Role.DRAFT]
            reported = self._autoscaler.observe(core, drafts, now)
            for role in Role:
                self._follow(role, int(reported[f"{role.value}_at_least"]), int(reported[f"{role.value}_at_most"]))
                asked[role] = max(asked[role], self.replicas[role] + len(self._starting[role]))
        return asked

    def _follow(self, role: Role, at_least: int, at_most: int) -> None:
        starting = self._starting[role]
        while self.replicas[role] + len(starting) < at_least:
            starting.append(self._second + START_SECONDS)
        while self.replicas[role] + len(starting) > at_most:
            if starting:
                starting.pop()
            else:
                self.replicas[role] -= 1

    def _snapshot(self, clients: int) -> Any:
        drafts, running = self.replicas[Role.DRAFT], min(clients, 8 * self.replicas[Role.TARGET])
        rows = running / self.replicas[Role.TARGET]
        drafting = self._draft_length * (0.01 + 0.002 * running / drafts)
        self._busy += drafting / max(drafting, 0.08 + 0.001 * rows * (1 + self._draft_length))
        workers = [
            WorkerSnapshot(f"{role.value}-{number}", role, 0, 100, 100, 1)
            for role in Role
            for number in range(self.replicas[role])
        ]
        return replace(self._empty, live=clients, running=running, waiting=clients - running, workers=tuple(workers))


@pytest.mark.parametrize(("agreement", "draft_length"), [(0.1, 0), (0.5, 2), (0.8, 4)])
def test_a_rise_asks_for_no_more_replicas_than_hold_the_same_load_on_the_way_down(
    agreement: float, draft_length: int
) -> None:
    """Policy auto drafts about so many tokens at such an agreement of draft and target."""
    loop = Loop(draft_length)
    loop.run(4, 120)
    up = loop.run(16, 300)
    most = loop.run(64, 300)
    loop.run(16, 300)
    for role, number in loop.replicas.items():
        assert up[role] <= 1.3 * number
    assert most[Role.TARGET] == math.ceil(64 / 8 / 0.85)
    assert loop.replicas[Role.TARGET] < most[Role.TARGET]
    loop.run(1, 200)
    assert loop.replicas == {Role.TARGET: 1, Role.DRAFT: 1}


def test_a_constant_load_changes_the_numbers_only_once() -> None:
    loop = Loop(draft_length=8, max_targets=3)
    loop.run(40, 300)
    # There are never more drafts than targets.
    assert loop.run(40, 2000) == loop.replicas == {Role.TARGET: 3, Role.DRAFT: 3}


def test_a_target_counts_as_full_when_its_pages_are() -> None:
    autoscaler = Autoscaler(SchedulerConfig(max_running=48))
    core = SchedulerCore(SchedulerConfig()).snapshot()
    assert autoscaler.observe(core, [], 0.0) == {}
    assert autoscaler.decision is None
    autoscaler.set_rules({"target": {"max_replicas": 4, "upscale_delay_seconds": 0}})
    worker = WorkerSnapshot("target-0", Role.TARGET, 6, 20, 100, 1)
    told = autoscaler.observe(replace(core, live=9, running=6, waiting=3, workers=(worker,)), [], 1.0)
    assert told == {"target_at_least": 2.0, "target_at_most": 4.0}
    # Six sequences use 80 pages, so 100 pages hold 7.5 of them.
    assert autoscaler.decision.explanation == "2 targets: 9 sequences (3 waiting), 8 fill a target, load 1.20"


# --- configuration and Serve ------------------------------------------------------------------------------------------


def test_the_file_for_serve_names_the_policy_and_its_rules_beside_the_arguments() -> None:
    scaling = [
        "groups.cells=2",
        "models.draft_in=workers",
        "groups.target.autoscaling={max_replicas: 3, downscale_delay_seconds: 60}",
        "gateway.autoscaling={max_replicas: 2}",
    ]
    plain, scaled = (serve_content(load_configuration(None, overrides)) for overrides in (scaling[:2], scaling))
    (before,), (after,) = plain["applications"], scaled["applications"]
    # Ray replaces every replica when its version of an application changes.
    versions = {get_app_code_version(ServeApplicationSchema.model_validate(one)) for one in (before, after)}
    assert len(versions) == 1
    module, _, name = after["autoscaling_policy"]["policy_function"].partition(":")
    assert getattr(importlib.import_module(module), name) is FollowScheduler
    deployments = {one["name"]: one for one in after["deployments"]}
    scheduler = deployments["Scheduler"]
    assert (scheduler["autoscaling_config"]["min_replicas"], scheduler["autoscaling_config"]["max_replicas"]) == (1, 1)
    assert scheduler["user_config"]["target"]["downscale_delay_seconds"] == 60
    assert scheduler["user_config"]["draft"] is None
    # The policy itself waits.
    assert deployments["TargetWorker"]["autoscaling_config"]["downscale_delay_s"] == 0
    fixed = deployments["DraftWorker"]["autoscaling_config"]
    assert (fixed["min_replicas"], fixed["max_replicas"]) == (1, 1)
    for name in ("TargetWorker", "Scheduler"):
        assert deployments[f"{name}-2"] == {**deployments[name], "name": f"{name}-2"}
    ServeDeploySchema.model_validate(scaled)


def test_what_only_this_process_knows_goes_into_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The application is built somewhere else, from one replica of each kind."""
    monkeypatch.setattr("spool.deploy.ray_app.gpus._gpus_of_ray", lambda: 3.0)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(12)))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    config = load_configuration(
        None,
        [
            "models={target: model, draft: model, draft_in: workers}",
            "groups.target.replicas=3",
            "groups.target.autoscaling.max_replicas=3",
        ],
    )
    (application,) = serve_content(settled(config))["applications"]
    built = configuration_from(application["args"]["settings"])
    assert built.models.target == str(tmp_path / "model")
    assert built.served_name == "model"
    assert [built.threads(role) for role in built.roles] == [3, 3]
    assert (built.groups.target.num_gpus, built.groups.draft.num_gpus) == (1.0, 0.0)


def test_each_cell_follows_its_own_scheduler() -> None:
    def deployment(name: str, replicas: float | None = None) -> Any:
        """What Serve shows a policy of it; a scheduler has reported the replicas that it wants."""
        value = {"replica": [SimpleNamespace(timestamp=1.0, value=replicas)]}
        reported = {} if replicas is None else {"target_at_least": value, "target_at_most": value}
        return SimpleNamespace(deployment_name=name, target_num_replicas=1, raw_metrics=reported)

    contexts = {
        "s": deployment("Scheduler", 3.0),
        "t": deployment("TargetWorker"),
        "s2": deployment("Scheduler-2", 2.0),
        "t2": deployment("TargetWorker-2"),
        "t3": deployment("TargetWorker-3"),
    }
    assert FollowScheduler()(contexts)[0] == {"t": 3.0, "t2": 2.0}


@pytest.mark.parametrize("name", ["gateway", "groups.target", "groups.draft"])
def test_whatever_scales_is_deployed_with_the_policy(name: str) -> None:
    assert load_configuration(None, [f"{name}.autoscaling={{max_replicas: 2}}"]).scales
    assert not load_configuration(None).scales


@pytest.mark.parametrize(("reported", "wanted"), [([96.0, 104.0], {"g": 4.0}), ([0.0], {"g": 0.0}), ([], {})])
def test_gateways_follow_the_requests_open_at_all_of_them(reported: list[float], wanted: dict[str, float]) -> None:
    """Without a report the number stays."""
    of_replicas = {OPEN_REQUESTS: dict(enumerate(reported))} if reported else {}
    (scaling,) = replica_options(
        load_configuration(None, ["gateway.autoscaling={max_replicas: 9, target_ongoing_requests: 50}"]).gateway
    ).values()
    config = AutoscalingConfig.model_validate(scaling)
    context: Any = SimpleNamespace(deployment_name="Gateway", aggregated_metrics=of_replicas, config=config)
    assert FollowScheduler()({"g": context})[0] == wanted
