"""The parts of `spool bench offline` that need no worker: grid, sums over rounds, summaries, the file that goes on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.offline.grid import Grid, GridPoint, System
from bench.offline.inputs import bench_prompts, evenly_spaced
from bench.offline.options import BenchInputs, BenchModels, BenchOfflineSettings, Exactness, GridSettings, Peer
from bench.offline.results_file import BenchFile
from bench.offline.rounds import NO_CATEGORY, RoundLog
from bench.offline.summary import Measurement, Spread, summarise
from bench.offline.tables import agreement, cells_table
from bench.offline.workers import plan_workers
from deploy.errors import UsageError
from deploy.offline.decoding import Job
from deploy.offline.prompts import Prompt
from scheduler.messages import Role
from scheduler.sampling import SamplingParameters
from services.backend.sequence_stream import TokenDelta
from tests.support.command_line import write_lines

PLAIN = GridPoint(System.PLAIN, 8)
AUTO = GridPoint(System.AUTO, 8, "demo", 4)
PEER = GridPoint(System.TRANSFORMERS, 8, exact=None)


def grid(*systems: System, **changes: Any) -> list[GridPoint]:
    axes: dict[str, Any] = {
        "batch_sizes": [1, 8],
        "drafts": ["demo", "ngram"],
        "model_drafts": ["demo"],
        "draft_lengths": [2, 4],
        "exact": [True, False],
    }
    return Grid(systems=systems, **axes | changes).points()


def measured(point: GridPoint, repeat: int, speed: float, exact_match: float = 1.0) -> Measurement:
    return Measurement(point, repeat, int(speed * 10), 10.0, exact_match, [], "code")


def job(index: int, category: str | None) -> Job:
    return Job(Prompt(index, f"line {index}", "text", (), None, category), (1, 2), 8, SamplingParameters())


# The grid.


def test_plain_decoding_has_neither_draft_nor_draft_length() -> None:
    points = grid(System.AUTO, System.PLAIN)
    plain = [point for point in points if point.system is System.PLAIN]
    assert plain == [GridPoint(System.PLAIN, batch, exact=exact) for batch in (1, 8) for exact in (True, False)]
    assert len(points) == 4 + 2 * 2 * 2 * 2
    assert len(set(points)) == len(points)
    assert points[0].system is System.PLAIN


def test_other_systems_know_no_exactness_and_take_models_only() -> None:
    points = grid(System.TRANSFORMERS, System.ASSISTED, System.VLLM_DRAFT)
    assert all(point.exact is None for point in points)
    assert {point.draft for point in points if point.system is not System.TRANSFORMERS} == {"demo"}
    assert {point.batch_size for point in points if point.system is System.ASSISTED} == {1}


def test_prompt_lookup_of_another_system_needs_no_draft_model() -> None:
    found = [point for point in grid(System.VLLM, System.VLLM_NGRAM) if point.system is System.VLLM_NGRAM]
    assert {point.draft for point in found} == {"ngram"}
    assert {point.reference for point in found} == {GridPoint(System.VLLM, 1, exact=None)}


def test_a_cell_is_compared_with_plain_decoding_like_itself() -> None:
    points = grid(System.PLAIN, System.AUTO, System.TRANSFORMERS, categories=[None, "qa"])
    for point in points:
        baseline = point.baseline(points)
        assert baseline is not None
        assert baseline.system is System.PLAIN
        assert (baseline.batch_size, baseline.category) == (point.batch_size, point.category)
        assert baseline.exact == (True if point.exact is None else point.exact)
    assert AUTO.baseline([AUTO, PEER]) is None
    assert PEER.baseline([replace(PLAIN, exact=False)]) == replace(PLAIN, exact=False)


def test_outputs_are_compared_with_batch_one_of_the_same_maker() -> None:
    assert AUTO.reference == GridPoint(System.PLAIN, 1)
    assert replace(AUTO, exact=False).reference == GridPoint(System.PLAIN, 1, exact=False)
    assert GridPoint(System.ASSISTED, 1, "demo", 4, None).reference == GridPoint(System.TRANSFORMERS, 1, exact=None)
    assert GridPoint(System.VLLM_DRAFT, 8, "demo", 4, None).reference == GridPoint(System.VLLM, 1, exact=None)


def test_points_survive_json() -> None:
    for point in grid(*System, categories=[None, "qa"]):
        assert GridPoint.from_json(json.loads(json.dumps(point.to_json()))) == point


# Settings.


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"grid": {"policy": ["vllm"]}}, "policy is vllm, must be one of plain, eqspec, exspec, ragged, auto"),
        ({"grid": {"max_running": 8, "max_running_batches": 2}}, "max_running and max_running_batches are both given"),
        (
            {"grid": {"batch_size": [1, 64], "max_running": 8}},
            "max_running is 8, must be at least batch_size, which is 64",
        ),
        ({"grid": {"draft_length": [0]}}, "draft_length is 0, must be between 1 and 64"),
        ({"models": {"draft": ["demo+lookup=x"]}}, "must hold a number of tokens after"),
        ({"peer": ["vllm"], "sampling": {"temperature": 1.0}}, "temperature is 1.0, must be 0 with --peer"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BenchOfflineSettings.model_validate(settings)


def test_workers_are_shared_between_cells_that_need_the_same() -> None:
    models = BenchModels(draft=["demo", "ngram"], device="cpu", exact=[Exactness.ON], threads=1, plain_threads=2)
    settings = BenchOfflineSettings(models=models, grid=GridSettings(), peer=[Peer.TRANSFORMERS])
    plain = [GridPoint(System.PLAIN, batch) for batch in (1, 8)]
    points = [*plain, AUTO, replace(AUTO, batch_size=1), replace(AUTO, draft="ngram")]
    launches, used = plan_workers(settings, points, [100, 100])
    assert [(launch.role, launch.threads) for launch in launches] == [
        (Role.TARGET, 2),
        (Role.TARGET, 1),
        (Role.DRAFT, 1),
        (Role.DRAFT, 1),
    ]
    assert used[plain[0]] == used[plain[1]] == [0]
    assert used[AUTO] == used[replace(AUTO, batch_size=1)] == [1, 2]
    assert used[replace(AUTO, draft="ngram")] == [1, 3]


def test_cells_with_several_workers_of_a_kind_get_that_many() -> None:
    models = BenchModels(device="cpu", threads=1, plain_threads=1, target_workers=2)
    launches, used = plan_workers(BenchOfflineSettings(models=models), [PLAIN, AUTO], [100])
    assert [launch.role for launch in launches] == [Role.TARGET, Role.TARGET, Role.DRAFT]
    assert (used[PLAIN], used[AUTO]) == ([0, 1], [0, 1, 2])


# Prompts.


def test_prompts_are_chosen_by_category_spaced_evenly_and_cut(tmp_path: Path) -> None:
    lines = [{"prompt": f"number {n}", "category": "ab"[n % 2]} for n in range(10)]
    path = write_lines(tmp_path / "prompts.jsonl", *lines, {"turns": ["a question"], "category": "c"})
    chosen = bench_prompts(BenchInputs(prompts=path, category=["b"], count=2, limit_characters=6))
    assert [(prompt.index, prompt.text, prompt.category) for prompt in chosen] == [
        (1, "number", "b"),
        (5, "number", "b"),
    ]
    (question,) = bench_prompts(BenchInputs(prompts=path, category=["c"], limit_characters=3))
    assert question.messages == ({"role": "user", "content": "a q"},)
    with pytest.raises(UsageError, match="category is 'd', must be one of those in the prompts: a, b, c"):
        bench_prompts(BenchInputs(prompts=path, category=["d"]))


def test_even_spacing_takes_all_where_there_are_fewer() -> None:
    prompts = [job(index, None).prompt for index in range(5)]
    assert [prompt.index for prompt in evenly_spaced(prompts, 2)] == [0, 2]
    assert [prompt.index for prompt in evenly_spaced(prompts, 9)] == [0, 1, 2, 3, 4]


# Rounds.


def test_rounds_are_summed_by_category_and_place() -> None:
    times = iter([0.0, 1.0, 3.0, 0.0, 2.0])
    log = RoundLog([job(0, "qa"), job(1, None)], lambda: next(times))
    log.add(0, TokenDelta((5,), 0, 0))
    log.add(0, TokenDelta((6, 7, 8), 4, 2))
    log.add(0, TokenDelta((9,), 1, 0))
    log.add(1, TokenDelta((5,), 0, 0))
    log.add(1, TokenDelta((6,), 0, 0))
    found = {name: category.to_json() for name, category in log.by_category().items()}
    assert found["qa"] == {
        "sequences": 1,
        "tokens": 5,
        "rounds": 2,
        "committed_per_round": 2.0,
        "drafted_at": [2, 1, 1, 1],
        "accepted_at": [1, 1, 0, 0],
        "sequence_tokens_per_second": pytest.approx(4 / 3),
    }
    assert agreement(found["qa"]) == [0.5, 1.0, 0.0, 0.0]
    assert found[NO_CATEGORY]["committed_per_round"] == 1.0
    assert found[NO_CATEGORY]["drafted_at"] == []


# Summaries.


def test_ratios_are_taken_repeat_by_repeat() -> None:
    # The machine is half as fast in the second repeat: the ratio does not care, the median of speeds would.
    speeds = {PLAIN: (100.0, 50.0, 100.0), AUTO: (150.0, 75.0, 160.0)}
    measurements = [measured(point, n, speed) for point, found in speeds.items() for n, speed in enumerate(found)]
    measurements.append(measured(PEER, 0, 25.0, exact_match=0.5))
    plain, auto, peer = summarise(measurements)
    assert plain.ratio_to_plain == Spread(1.0, 1.0, 1.0)
    assert auto.ratio_to_plain == Spread(1.5, 1.5, 1.6)
    assert auto.tokens_per_second == Spread(150.0, 75.0, 160.0)
    assert auto.typical.repeat == 0
    assert peer.ratio_to_plain == Spread(0.25, 0.25, 0.25)
    assert (peer.repeats, peer.exact_match) == (1, 0.5)


def test_exact_match_is_that_of_the_worst_repeat() -> None:
    (summary,) = summarise([measured(AUTO, 0, 10.0), measured(AUTO, 1, 11.0, exact_match=0.25)])
    assert summary.exact_match == 0.25
    assert summary.ratio_to_plain is None


def test_the_table_has_a_row_for_each_cell() -> None:
    cells = [summary.to_json() for summary in summarise([measured(PLAIN, 0, 10.0), measured(PEER, 0, 5.0)])]
    assert cells_table(cells).row_count == 2


# The file.


def open_file(path: Path, **changes: Any) -> BenchFile:
    settings = {"target": "demo", "threads": None, "window": 48} | changes
    return BenchFile(path, settings, {"cores": 2}, "spool bench offline")


def test_a_file_goes_on_with_what_it_holds(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    file = open_file(path)
    file.set_reference(AUTO.reference, ["aa", "bb"])
    file.add(measured(AUTO, 0, 10.0))
    file.leave_out("vllm", "no --vllm-python was given")
    again = open_file(path)
    assert again.references == {AUTO.reference: ["aa", "bb"]}
    assert again.measurements == [measured(AUTO, 0, 10.0)]
    assert again.find(AUTO, 0) is not None
    assert again.find(AUTO, 1) is None
    assert again.find(PLAIN, 0) is None
    again.add(measured(AUTO, 1, 30.0))
    content = json.loads(path.read_text())
    assert [cell["tokens_per_second"]["median"] for cell in content["cells"]] == [20.0]
    assert content["commands"] == ["spool bench offline"]
    assert content["left_out"] == {"vllm": "no --vllm-python was given"}
    assert list(tmp_path.iterdir()) == [path]


def test_other_settings_or_machines_are_not_mixed_in(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    open_file(path).add(measured(AUTO, 0, 10.0))
    with pytest.raises(UsageError, match="settings window = 48, not 8"):
        open_file(path, window=8)
    with pytest.raises(UsageError, match="machine cores = 2, not 64"):
        BenchFile(path, {"target": "demo", "threads": None, "window": 48}, {"cores": 64}, "")


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"kind": "serve"}'])
def test_a_file_of_something_else_is_left_alone(tmp_path: Path, content: str) -> None:
    path = tmp_path / "bench.json"
    path.write_text(content)
    with pytest.raises(UsageError, match="choose another --output"):
        open_file(path)
    assert path.read_text() == content
