"""The parts of the autoscaling policy: laws, hysteresis, words, and what Serve is told."""

from __future__ import annotations

import importlib
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.serve.schema import ServeDeploySchema

from deploy.autoscaling.capacity import CellFigures, Goals, RoundLaw, needs
from deploy.autoscaling.decision import GroupRules, Past, Rules, Sample, decide
from deploy.autoscaling.explanation import explain
from deploy.autoscaling.policy import FollowScheduler
from deploy.autoscaling.recent import Reading, add_reading, figures_of
from deploy.autoscaling.reporter import Autoscaler
from deploy.autoscaling.rules import plain_rules, rules_from_plain, rules_of
from deploy.config.loading import configuration_from, load_configuration
from deploy.config.problems import ConfigurationError
from deploy.ray_app.application import settled
from deploy.ray_app.serve_options import serve_content
from scheduler.config import SchedulerConfig
from scheduler.core import SchedulerCore
from scheduler.messages import Role, SequenceRequest, SequenceSubmitted, WorkerJoined, WorkerSpec
from services.scheduler.telemetry.statistics import StatisticsSnapshot

MEASURED = CellFigures(
    targets=2,
    drafts=1,
    running=34,
    tokens_per_second=1600,
    offered_tokens_per_second=1600,
    tokens_per_sequence=100,
    seconds_per_token=0.021,
    acceptance=0.6,
    drafted_per_round=3,
    accepted_per_round=1.2,
    target_base=0.02,
    target_row=0.001,
    draft_pass=0.002,
    draft_row=0.0002,
    batch_size=16,
    draft_length=4,
    room=100,
)
RULES = Rules(GroupRules(1, 5, 10, 60), GroupRules(1, 3, 10, 60), Goals(token_seconds=0.05))

any_float = st.one_of(st.floats(), st.sampled_from([0.0, -1.0, math.nan, math.inf, 1e-300, 1e300]))
any_count = st.integers(-3, 10**9)
any_figures = st.builds(
    CellFigures,
    targets=st.integers(0, 20),
    drafts=st.integers(0, 20),
    running=any_float,
    waiting=any_float,
    growth=any_float,
    tokens_per_second=any_float,
    offered_tokens_per_second=any_float,
    tokens_per_sequence=any_float,
    seconds_per_token=any_float,
    acceptance=any_float,
    drafted_per_round=any_float,
    accepted_per_round=any_float,
    target_base=any_float,
    target_row=any_float,
    draft_pass=any_float,
    draft_row=any_float,
    batch_size=any_count,
    draft_length=any_count,
    room=any_float,
    target_busy=any_float,
    draft_busy=any_float,
    stretch=any_float,
)
some_seconds = st.floats(0, 1)
sane_figures = st.builds(
    CellFigures,
    running=st.floats(0, 1000),
    waiting=st.floats(0, 1000),
    growth=st.floats(0, 50),
    tokens_per_sequence=st.one_of(st.just(math.nan), st.floats(1, 1000)),
    acceptance=st.floats(0, 1),
    drafted_per_round=st.floats(0, 8),
    accepted_per_round=st.floats(0, 8),
    target_base=some_seconds,
    target_row=some_seconds,
    draft_pass=some_seconds,
    draft_row=some_seconds,
    batch_size=st.integers(1, 64),
    draft_length=st.integers(0, 8),
    room=st.floats(1, 500),
    stretch=st.floats(1, 4),
)


# --- laws -------------------------------------------------------------------------------------------------------------


@given(
    st.builds(
        RoundLaw,
        base=st.floats(1e-4, 1),
        per_sequence=st.floats(1e-6, 1),
        drafting=st.floats(0, 1),
        drafting_per_sequence=st.floats(0, 1),
        batch=st.integers(1, 64).map(float),
    ),
    st.floats(1e-3, 10),
)
def test_the_most_sequences_are_the_most(law: RoundLaw, seconds: float) -> None:
    most = law.sequences_within(seconds)
    if most > 1.0:
        assert law.seconds(most) <= seconds * (1 + 1e-6)
    assert law.seconds(most * 1.001 + 1e-6) >= seconds * (1 - 1e-6)


def test_needs_by_hand() -> None:
    """Plain decoding, so that all can be reckoned: 16 rows take 36 ms, and 0.0225 s more each further 10."""
    figures = replace(MEASURED, drafted_per_round=0, accepted_per_round=0, draft_length=0)
    found = needs(figures, Goals(token_seconds=0.045))
    # 16 in one step: 20 + 16 ms; beyond, 20/16 + 1 ms each: 45 ms for 20.
    assert found.per_target == pytest.approx(20)
    assert found.targets == pytest.approx(34 / 20)
    assert (found.drafts, found.saved_targets) == (0.0, 0.0)


def test_a_longer_stretch_lets_targets_hold_fewer_without_a_cliff() -> None:
    """Down to those with which a token takes a quarter longer than alone, by the same stretch."""
    figures = replace(MEASURED, drafted_per_round=0, accepted_per_round=0, draft_length=0, target_base=0.08)
    goals = Goals(token_seconds=0.2)
    held = [needs(replace(figures, stretch=1 + step / 200), goals).per_target for step in range(601)]
    alone = 0.08 + MEASURED.target_row
    # Steps of 16 and more: 6 ms for each.
    assert (held[0], held[-1]) == pytest.approx((0.2 / 0.006, 1.25 * alone / 0.006))
    assert all(more * (1 + 1e-9) >= fewer >= 0.99 * more for more, fewer in pairwise(held))
    assert needs(replace(figures, stretch=4.0), goals).token_seconds == pytest.approx(4 * 1.25 * alone)


def test_drafts_by_hand() -> None:
    """Perfect drafts of one token: rounds may take 100 ms, and yield two tokens."""
    figures = replace(MEASURED, acceptance=1.0, draft_length=1, drafted_per_round=1, accepted_per_round=1)
    found = needs(figures, Goals(token_seconds=0.05))
    # A target: 20/16 + 2 ms each. A draft: 2 passes of 2 ms, 0.2 ms each.
    assert found.per_target == pytest.approx(100 / 3.25)
    # Drafting pays from an acceptance of 0.65 on, of which rounds may take 82.5 ms.
    assert found.drafts == pytest.approx(34 * 0.2 / (82.5 - 4))
    # Without drafts: 20/16 + 1 ms each, for one token.
    assert found.saved_targets == pytest.approx(34 / (50 / 2.25) - 34 / (100 / 3.25))


def test_full_pages_count_like_time() -> None:
    assert needs(replace(MEASURED, room=5), Goals()).targets == pytest.approx(34 / 5)


def test_who_waits_counts_as_far_as_they_would_wait_too_long() -> None:
    patient = needs(replace(MEASURED, waiting=20), Goals(queue_seconds=50))
    hurried = needs(replace(MEASURED, waiting=20), Goals(queue_seconds=1))
    assert patient.sequences == pytest.approx(34 + 20 * 100 * 0.05 / 50)
    assert hurried.sequences == 54
    assert hurried.queue_seconds == pytest.approx(20 * 100 / 1600)


def test_a_steady_growth_counts_ahead() -> None:
    assert needs(replace(MEASURED, growth=1.5), Goals()).sequences == pytest.approx(34 + 15)


def test_there_are_never_more_targets_than_sequences() -> None:
    decision, _ = decide(replace(MEASURED, running=2, room=1), RULES, Past(), 0.0)
    assert decision.target is not None
    assert decision.needs.targets == 2
    assert decision.target.now == Sample(0.0, 2, 2)


def test_a_target_that_nobody_can_hold_is_not_asked_for() -> None:
    found = needs(MEASURED, Goals(token_seconds=1e-6))
    assert found.token_seconds > 1e-3
    assert found.per_target >= 1


@given(sane_figures, st.floats(1, 10), st.sampled_from(["running", "waiting", "growth"]))
def test_more_load_never_needs_less(figures: CellFigures, factor: float, name: str) -> None:
    more = replace(figures, **{name: getattr(figures, name) * factor + 1})
    less, need = needs(figures, Goals(max_targets=6)), needs(more, Goals(max_targets=6))
    for before, after in ((less.targets, need.targets), (less.drafts, need.drafts)):
        assert (before is None) == (after is None)
        if before is not None and after is not None:
            assert after >= before * (1 - 1e-9)


@given(sane_figures, st.floats(0, 1), st.floats(0, 1))
def test_poorer_acceptance_never_needs_more_drafts(figures: CellFigures, one: float, other: float) -> None:
    poor, good = sorted((one, other))
    fewer = needs(replace(figures, acceptance=poor), Goals()).drafts
    more = needs(replace(figures, acceptance=good), Goals()).drafts
    assert (fewer or 0.0) <= (more or 0.0) + 1e-9


@given(st.lists(st.tuples(any_figures, any_float), min_size=1, max_size=8), st.booleans(), st.booleans())
def test_whatever_is_measured_the_bounds_hold(
    seen: list[tuple[CellFigures, float]], targets: bool, drafts: bool
) -> None:
    rules = Rules(RULES.target if targets else None, RULES.draft if drafts else None, RULES.goals)
    past = Past()
    for figures, now in seen:
        decision, past = decide(figures, rules, past, now)
        for group, bounds in ((decision.target, rules.target), (decision.draft, rules.draft)):
            assert (group is None) == (bounds is None)
            if group is not None and bounds is not None:
                low, high = bounds.min_replicas, bounds.max_replicas
                assert low <= group.at_least <= group.wanted <= group.at_most <= high
        explained = explain(decision, figures, rules)
        assert all(math.isfinite(number) for number in explained.figures.values())
        assert bool(explained.sentence) == (targets or drafts)


# --- hysteresis -------------------------------------------------------------------------------------------------------


def follow(loads: list[tuple[float, float]], seconds: float = 1.0) -> list[int]:
    """Targets wanted at each time, for sequences by the time since which they are there."""
    past, wanted, time = Past(), [], 0.0
    while time <= loads[-1][0]:
        running = next(count for since, count in reversed(loads) if time >= since)
        decision, past = decide(replace(MEASURED, targets=1, running=running), RULES, past, time)
        assert decision.target is not None
        wanted.append(decision.target.wanted)
        time += seconds
    return wanted


def test_more_are_wanted_after_the_delay_and_fewer_after_theirs() -> None:
    wanted = follow([(0, 1), (100, 90), (200, 1), (400, 1)])
    more = wanted.index(max(wanted))
    assert max(wanted) > 2
    assert more == 110
    # The last high load is of second 199.
    assert [second for second in range(111, 400) if wanted[second] < wanted[second - 1]] == [260]
    assert wanted[400] == 1


def test_a_load_that_goes_back_and_forth_changes_nothing() -> None:
    per_target = needs(MEASURED, RULES.goals).per_target
    # Just above what one target is used for at most, and just below.
    border = 0.85 * per_target
    wanted = follow([(10.0 * step, border * (1.05 if step % 2 else 0.9)) for step in range(60)])
    assert len([1 for before, after in pairwise(wanted) if before != after]) <= 1


def test_a_step_down_that_was_a_mistake_is_not_made_again() -> None:
    past, numbers = Past(), []
    for second in range(2000):
        # Of clients that do not wait for answers there are more in the cell when there are fewer targets.
        held = past.target.wanted or 2
        figures = replace(MEASURED, targets=2, running=5 if held >= 2 else 60)
        decision, past = decide(figures, RULES, past, float(second))
        assert decision.target is not None
        numbers.append(decision.target.wanted)
    changes = [second for second in range(1, 2000) if numbers[second] != numbers[second - 1]]
    assert len(changes) <= 3
    assert min(numbers[changes[1] :]) >= 2
    for second in range(2000, 2200):
        quiet = replace(MEASURED, targets=2, running=5, offered_tokens_per_second=100)
        decision, past = decide(quiet, RULES, past, float(second))
    assert decision.target is not None
    assert decision.target.wanted == 1


def test_what_tokens_take_while_targets_are_on_their_way_asks_for_no_more_of_them() -> None:
    def wanted_after(seconds: int, arrived: int | None) -> int:
        """Of a load that two targets hold, while each token takes four times as long until the second is there."""
        past, wanted = Past(), 1
        for second in range(seconds):
            there = arrived is not None and second >= arrived
            figures = replace(MEASURED, targets=2 if there else 1, stretch=4.0 if wanted > 1 and not there else 1.0)
            decision, past = decide(figures, RULES, past, float(second))
            assert decision.target is not None
            wanted = decision.target.wanted
        return wanted

    assert wanted_after(20, None) == 2
    assert wanted_after(200, 40) == 2
    # Those that load a large model take minutes.
    assert wanted_after(600, None) == 2


def test_nothing_measured_keeps_what_is_there() -> None:
    decision, _ = decide(CellFigures(targets=3, drafts=2, waiting=50), RULES, Past(), 0.0)
    assert decision.target is not None
    assert decision.draft is not None
    assert (decision.target.wanted, decision.draft.wanted) == (3, 2)
    assert (decision.target.at_least, decision.target.at_most) == (1, 5)
    assert "no step was measured yet" in explain(decision, CellFigures(), RULES).sentence


# --- words and readings -----------------------------------------------------------------------------------------------


def test_the_sentence_says_the_numbers_it_used() -> None:
    past = Past()
    for second in range(100):
        decision, past = decide(MEASURED, RULES, past, float(second))
    sentence = explain(decision, MEASURED, RULES).sentence
    found = needs(MEASURED, replace(RULES.goals, max_targets=5))
    assert found.targets is not None
    assert f"targets: 34 sequences at 21 ms a token, {found.per_target:.1f} on a target at 50 ms" in sentence
    assert f"need {found.targets:.2f}" in sentence
    assert "; 1 draft: acceptance 0.60 saves" in sentence


def test_rates_are_of_the_last_seconds() -> None:
    readings: tuple[Reading, ...] = ()
    for second in range(200):
        readings = add_reading(
            readings,
            Reading(
                time=float(second),
                arrived=3 * second,
                ended=2 * second,
                tokens=200 * second,
                deliveries=100 * second,
                drafted=400 * second,
                accepted=100 * second,
                decoding=10,
                running=12,
                waiting=second // 10,
                targets=2,
                target_busy=0.5,
                target_base=0.05,
            ),
        )
    assert readings[0].time == 139
    figures = figures_of(readings, 8, 4)
    assert figures.tokens_per_second == pytest.approx(200)
    assert figures.tokens_per_sequence == pytest.approx(100)
    assert figures.offered_tokens_per_second == pytest.approx(300)
    assert figures.seconds_per_token == pytest.approx(10 / 200)
    assert (figures.drafted_per_round, figures.accepted_per_round) == pytest.approx((4, 1))
    # By the law 0.025 s a token, twice as long measured, and the targets were idle for half of it.
    assert figures.stretch == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("before", "after", "growth"), [(lambda _: 4, lambda _: 40, 0.0), (lambda t: 2 * t, lambda t: 2 * t, 2.0)]
)
def test_a_step_is_no_trend(before: Any, after: Any, growth: float) -> None:
    readings: tuple[Reading, ...] = ()
    for second in range(31):
        running = int((before if second < 28 else after)(second))
        readings = add_reading(readings, Reading(time=float(second), running=running))
    assert figures_of(readings, 8, 4).growth == pytest.approx(growth)


def test_a_scheduler_is_read() -> None:
    config = SchedulerConfig(batch_size=4)
    core = SchedulerCore(config)
    specs = [WorkerSpec(role.value, role, 4, 40, 100, 64) for role in Role]
    autoscaler = Autoscaler(config)
    assert autoscaler.observe(core.snapshot(), StatisticsSnapshot(), 0.0) == {}
    assert autoscaler.status() is None
    autoscaler.set_rules(RULES)
    for spec in specs:
        core.handle([WorkerJoined(spec)], 1.0)
    core.handle([SequenceSubmitted(SequenceRequest(1, (1, 2, 3), 5))], 1.0)
    told = autoscaler.observe(core.snapshot(), StatisticsSnapshot(), 1.0)
    assert told == {"target_at_least": 1.0, "target_at_most": 5.0, "draft_at_least": 1.0, "draft_at_most": 3.0}
    status = autoscaler.status()
    assert status is not None
    assert status["figures"]["targets_in_use"] == 1
    assert status["explanation"] == "1 target: no step was measured yet; 1 draft: no step was measured yet"


# --- configuration and Serve ------------------------------------------------------------------------------------------


def test_rules_go_through_plain_data() -> None:
    config = load_configuration(
        None, ["groups.target.autoscaling={max_replicas: 7, token_seconds: 0.02, cost: 4}", "groups.draft.replicas=2"]
    )
    rules = rules_of(config)
    assert rules.target == GroupRules(1, 7, 10.0, 300.0, 0.85, 0.2)
    assert rules.draft is None
    assert (rules.goals.token_seconds, rules.goals.target_cost, rules.goals.draft_cost) == (0.02, 4.0, 1.0)
    assert rules_from_plain(plain_rules(rules)) == rules
    assert rules_from_plain(plain_rules(RULES)) == RULES


def test_rules_that_cannot_hold_are_refused() -> None:
    with pytest.raises(ConfigurationError) as raised:
        load_configuration(
            None,
            [
                "groups.target.autoscaling={utilisation: 0.5, hysteresis: 0.5, token_seconds: 0}",
                "groups.draft.autoscaling={hysteresis: 0.9}",
            ],
        )
    told = "\n".join(str(problem) for problem in raised.value.problems)
    assert "groups.target.autoscaling.token_seconds is 0, must be above 0" in told
    assert "groups.draft.autoscaling.hysteresis is 0.9, must be below utilisation, which is 0.85" in told


def test_the_file_for_serve_names_the_policy_and_its_rules_beside_the_arguments() -> None:
    scaling = "groups.target.autoscaling={max_replicas: 3, downscale_delay_seconds: 60}"
    plain, scaled = serve_content(load_configuration(None)), serve_content(load_configuration(None, [scaling]))
    (before,), (after,) = plain["applications"], scaled["applications"]
    assert after["args"] == before["args"]
    assert "autoscaling_policy" not in before
    module, _, name = after["autoscaling_policy"]["policy_function"].partition(":")
    assert getattr(importlib.import_module(module), name) is FollowScheduler
    deployments = {one["name"]: one for one in after["deployments"]}
    scheduler = deployments["Scheduler"]
    assert (scheduler["autoscaling_config"]["min_replicas"], scheduler["autoscaling_config"]["max_replicas"]) == (1, 1)
    assert rules_from_plain(scheduler["user_config"]) == rules_of(load_configuration(None, [scaling]))
    # The policy itself waits.
    assert deployments["TargetWorker"]["autoscaling_config"]["downscale_delay_s"] == 0
    assert "autoscaling_config" not in deployments["DraftWorker"]
    ServeDeploySchema.model_validate(scaled)


def test_what_only_this_process_knows_goes_into_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The application is built somewhere else, from one replica of each kind."""
    monkeypatch.setattr("deploy.ray_app.gpus._gpus_of_ray", lambda: 3.0)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(12)))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    config = load_configuration(
        None,
        [
            "models={target: model, draft: model}",
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


def context(name: str, current: int, reported: dict[str, list[tuple[float, float]]] | None = None) -> Any:
    """What Serve shows a policy of one deployment; `reported` by name are times and values."""
    series = {
        metric: {"replica": [SimpleNamespace(timestamp=time, value=value) for time, value in values]}
        for metric, values in (reported or {}).items()
    }
    config = SimpleNamespace(get_target_ongoing_requests=lambda: 10, get_upscaling_factor=lambda: 1.0)
    return SimpleNamespace(
        deployment_name=name,
        target_num_replicas=current,
        current_num_replicas=current,
        raw_metrics=series,
        total_num_requests=35.0,
        config=config,
        policy_state={},
    )


@pytest.mark.parametrize(("current", "expected"), [(1, 2), (2, 2), (3, 3), (5, 4)])
def test_serve_is_told_to_stay_within_what_the_scheduler_wants(current: int, expected: int) -> None:
    reported = {"target_at_least": [(1.0, 5.0), (2.0, 2.0)], "target_at_most": [(2.0, 4.0)]}
    contexts = {
        "s": context("Scheduler", 1, reported),
        "t": context("TargetWorker", current),
        "d": context("DraftWorker", 2),
        "g": context("Gateway", 2),
    }
    wanted, _ = FollowScheduler()(contexts)
    assert wanted == {"t": expected, "g": pytest.approx(3.5)}


def test_each_cell_follows_its_own_scheduler() -> None:
    def reported(replicas: float) -> dict[str, list[tuple[float, float]]]:
        return {"target_at_least": [(1.0, replicas)], "target_at_most": [(1.0, replicas)]}

    contexts = {
        "s": context("Scheduler", 1, reported(3.0)),
        "t": context("TargetWorker", 1),
        "s2": context("Scheduler-2", 1, reported(2.0)),
        "t2": context("TargetWorker-2", 1),
        "t3": context("TargetWorker-3", 1),
    }
    assert FollowScheduler()(contexts)[0] == {"t": 3.0, "t2": 2.0}


def test_the_file_for_serve_has_the_groups_of_every_cell() -> None:
    overrides = ["groups.cells=2", "groups.target={replicas: 2, autoscaling: {max_replicas: 3}}"]
    content = serve_content(load_configuration(None, overrides))
    (application,) = content["applications"]
    names = [one["name"] for one in application["deployments"]]
    cells = ["TargetWorker", "DraftWorker", "TargetWorker-2", "DraftWorker-2", "Scheduler", "Scheduler-2"]
    assert names == ["Gateway", *cells]
    deployments = {one["name"]: one for one in application["deployments"]}
    assert deployments["TargetWorker-2"]["autoscaling_config"] == deployments["TargetWorker"]["autoscaling_config"]
    assert deployments["Scheduler-2"]["user_config"] == deployments["Scheduler"]["user_config"]
    assert configuration_from(application["args"]["settings"]).groups.cells == 2
    ServeDeploySchema.model_validate(content)


def test_without_a_scheduler_nothing_changes() -> None:
    assert FollowScheduler()({"t": context("TargetWorker", 2), "s": context("Scheduler", 1)})[0] == {}
    assert FollowScheduler()({})[0] == {}


def test_samples_without_a_need_allow_everything() -> None:
    decision, _ = decide(replace(MEASURED, target_base=math.nan), RULES, Past(), 5.0)
    assert decision.target is not None
    assert decision.target.now == Sample(5.0, 1, 5)
