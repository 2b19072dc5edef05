"""What `python -m bench.offline` measures, and what it says of it, with small numbers."""

from __future__ import annotations

from pathlib import Path

from bench.offline.grid import GridPoint, System, grid_points
from bench.offline.results import Domain, Measurement, by_domain, domain_line, summarise
from spool.deploy.offline.decoding import Completion
from spool.deploy.offline.prompts import Prompt, load_prompts
from tests.support.command_line import write_lines

AUTO = GridPoint(System.AUTO, 8, "demo", 4)


def measured(repeat: int, **domains: Domain) -> Measurement:
    return Measurement(AUTO, repeat, 100, 2.0, 1.0, [], 1.0, {"drafted": 0}, domains)


def test_each_domain_has_the_passes_of_its_prompts() -> None:
    prompts = [Prompt(place, "", "text", (), category=name) for place, name in enumerate(("qa", "maths", "qa", ""))]
    counts = ((4, 8), (10, 15), (6, 7), (0, 0))
    completions = [Completion(passes=passes, passed=tokens) for passes, tokens in counts]
    found = by_domain(prompts, completions)
    assert found == {"qa": Domain(2, 10, 15), "maths": Domain(1, 10, 15), "": Domain(1, 0, 0)}
    assert [one.acceptance_length for one in found.values()] == [1.5, 1.5, None]


def test_acceptance_lengths_are_over_the_passes_of_all_repeats() -> None:
    """Not the mean of means: a domain with more passes counts for more."""
    first = measured(0, qa=Domain(2, 10, 15), maths=Domain(1, 20, 60))
    second = measured(1, qa=Domain(2, 30, 65), maths=Domain(1, 20, 40))
    (cell,) = summarise([first, second])
    assert cell["acceptance_length"] == 180 / 80
    assert cell["domains"] == {
        "qa": {"prompts": 2, "acceptance_length": 2.0},
        "maths": {"prompts": 1, "acceptance_length": 2.5},
    }
    assert domain_line(cell) == "  acceptance length 2.25: qa 2.00, maths 2.50"
    # Measurements stay as they were.
    assert first.domains["qa"] == Domain(2, 10, 15)


def test_prompts_of_one_kind_have_no_line_of_their_own() -> None:
    (cell,) = summarise([measured(0, qa=Domain(2, 10, 15))])
    assert domain_line(cell) is None


def test_every_temperature_is_measured_beside_plain_decoding() -> None:
    points = grid_points([System.AUTO], [8], "demo", [4], [0.0, 1.0])
    plain = [GridPoint(System.PLAIN, 8, temperature=warmth) for warmth in (0.0, 1.0)]
    auto = [GridPoint(System.AUTO, 8, "demo", 4, warmth) for warmth in (0.0, 1.0)]
    assert points == [*plain, *auto]
    assert [point.baseline for point in points] == [*plain, *plain]
    assert [str(point) for point in auto] == ["auto, batch 8, demo x 4", "auto, batch 8, demo x 4, temperature 1"]


def test_a_line_names_the_category_of_its_prompt(tmp_path: Path) -> None:
    """As Spec-Bench has it."""
    line = {"question_id": 81, "category": "writing", "turns": ["Compose a post.", "Rewrite it."]}
    path = write_lines(tmp_path / "questions.jsonl", line, {"prompt": "once", "category": None})
    assert [(one.identity, one.category) for one in load_prompts(path, None)] == [(81, "writing"), (None, "")]
