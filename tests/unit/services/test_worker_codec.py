"""What a worker answers for the rows of a step reaches the scheduler whole; what does not add up is refused by name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from spool.protos import worker_pb2
from spool.scheduler.messages import ProposalSource, Row, RowResult, RowStatus, SendStep, SequenceRequest, TokenLogprobs
from spool.services.rpc.worker_codec import (
    answers_to_wire,
    opening_to_wire,
    results_from_wire,
    spec_from_wire,
    step_to_wire,
)


def row(sequence_id: int, **more: object) -> Row:
    return replace(Row(sequence_id, 4, 77, (1, 2), 6, sample=True), **more)  # type: ignore[arg-type]


def following(sequence_id: int, **more: object) -> Row:
    return row(sequence_id, tokens=(), follows=True, **more)


def decoded(step: SendStep, results: list[RowResult]) -> tuple[RowResult, ...]:
    """As they come out at the other end."""
    reply = worker_pb2.StepReply(rows=answers_to_wire(results))
    return results_from_wire(step, worker_pb2.StepReply.FromString(reply.SerializeToString()))


SCORED = TokenLogprobs(7, -0.5, ((7, -0.5), (9, -2.0)))


@pytest.mark.parametrize(
    "results",
    [
        pytest.param([], id="no rows"),
        pytest.param(
            [RowResult(3, RowStatus.OK, 6, 0, (5,)), RowResult(4, RowStatus.OK, 9, 0, (5, 6, 7), 2, verified=4)],
            id="sampled",
        ),
        pytest.param(
            [
                RowResult(place, RowStatus.OK, 7, 0, (5, 6), 1, verified=1, source=source)
                for place, source in enumerate((None, *ProposalSource))
            ],
            id="proposed by all who can",
        ),
        pytest.param(
            [RowResult(3, RowStatus.OK, 6, 2**59 + 1, reused=4), RowResult(4, RowStatus.OK, 6, 0, (8,))], id="a prefill"
        ),
        pytest.param(
            [
                RowResult(3, RowStatus.OUT_OF_PAGES, 2, 99, error="0 pages are free", reused=1),
                RowResult(4, RowStatus.OK, 7, 0, (5, 6), 1, verified=1),
                RowResult(5, RowStatus.VOID, 1, 5),
                RowResult(6, RowStatus.KV_MISMATCH, 3, 11),
            ],
            id="failures",
        ),
        pytest.param(
            [
                RowResult(3, RowStatus.OK, 7, 0, (5, 7), 1, (15, 2**63), verified=1),
                RowResult(4, RowStatus.OK, 7, 0, (5, 6), 1, verified=3),
                RowResult(5, RowStatus.OK, 6, 0, (7,), 0, logprobs=(SCORED,)),
                RowResult(6, RowStatus.OK, 6, 31, prompt_logprobs=(SCORED, SCORED)),
            ],
            id="digests and log probabilities of some",
        ),
    ],
)
@pytest.mark.parametrize("make", [row, following])
def test_answers_reach_the_scheduler_as_they_were(make: type[Row], results: list[RowResult]) -> None:
    step = SendStep("t0", 5, tuple(make(result.sequence_id) for result in results))
    assert decoded(step, results) == tuple(results)


def test_no_message_goes_for_a_row_that_has_only_given_tokens() -> None:
    answers = answers_to_wire([RowResult(one, RowStatus.OK, 6, 0, (5,)) for one in range(256)])
    told = {field.name for field, _ in answers.ListFields()}
    assert told == {"counts", "tokens", "kv_lens"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"counts": [1]}, "counts holds 1 entries, must hold 2"),
        ({"counts": [1, 3]}, "tokens holds 3 entries, must hold 4"),
        ({"kv_lens": [6, 7, 8]}, "kv_lens holds 3 entries, must hold 2"),
        ({"statuses": [1]}, "statuses holds 1 entries, must hold 2"),
        ({"statuses": [1, 99]}, "row_status is 99"),
        ({"prefix_digests": [1, 2, 3]}, "prefix_digests holds 3 entries, must hold 2"),
        ({"verified": [1]}, "verified holds 1 entries, must hold 2"),
        ({"sources": [1]}, "sources holds 1 entries, must hold 2"),
        ({"sources": [1, 9]}, "proposal_source is 9"),
        ({"reused": [1]}, "reused holds 1 entries, must hold 2"),
        ({"logits_digests": [1, 2]}, "logits_digests holds 2 entries, must hold 3"),
        ({"details": [{"row": 2}]}, "details are of row 2, must be above -1 and below 2"),
        ({"details": [{"row": 1}, {"row": 1}]}, "details are of row 1, must be above 1 and below 2"),
    ],
)
def test_answers_that_do_not_add_up_are_refused_by_name(change: dict[str, list[object]], message: str) -> None:
    columns: dict[str, list[object]] = {"counts": [1, 2], "tokens": [5, 6, 7], "kv_lens": [6, 7]}
    reply = worker_pb2.StepReply(rows=worker_pb2.RowAnswers(**(columns | change)))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        results_from_wire(SendStep("t0", 5, (row(3), row(4))), reply)


def test_an_opening_tells_what_output_is_expected() -> None:
    request = SequenceRequest(3, (1, 2), 9, expected_output=(5, 6, 7))
    parameters = opening_to_wire(request, (1, 2))
    assert (list(parameters.expected_output), list(parameters.committed_tokens)) == ([5, 6, 7], [1, 2])


def test_a_step_says_how_much_each_row_verifies_and_proposes() -> None:
    rows = (row(3, verify=4, draft_length=2), row(4), following(5, verify=3, draft_length=1), following(6))
    grant = worker_pb2.DraftGrant(address="d0:1", number=8)
    request = step_to_wire(SendStep("t0", 5, rows, wait_seconds=0.25), 70, 80, grant)
    assert [(one.sequence_id, one.verify, one.draft_length) for one in request.rows] == [(3, 4, 2), (4, 0, 0)]
    assert list(request.following.sequence_ids) == [5, 6]
    assert list(request.following.verify) == [3, 0]
    assert list(request.following.draft_lengths) == [1, 0]
    assert request.grant == grant
    assert request.wait_seconds == 0.25


def test_where_lookup_finds_something_a_row_may_ask_for_another_number_of_tokens() -> None:
    """It says so where that differs, which workers of protocol version 21 do not heed."""
    rows = (row(3, draft_length=2, lookup_length=0), row(4, draft_length=2), following(5, draft_length=1))
    request = step_to_wire(SendStep("t0", 5, rows), 70, 80)
    assert [one.lookup_length if one.HasField("lookup_length") else None for one in request.rows] == [0, None]
    assert list(request.following.lookup_lengths) == []
    rows = (following(5, draft_length=1), following(6, draft_length=1, lookup_length=8))
    assert list(step_to_wire(SendStep("t0", 5, rows), 70, 80).following.lookup_lengths) == [1, 8]


@pytest.mark.parametrize(
    ("version", "release"),
    [("", ()), ("0.2.0", (0, 2, 0)), ("1.10rc1", (1, 10)), ("0.2.0.dev3+here", (0, 2, 0)), ("unknown", ())],
)
def test_the_release_of_a_worker_is_in_the_numbers_of_its_version(version: str, release: tuple[int, ...]) -> None:
    assert spec_from_wire("t0", described(version=version)).release == release


def test_targets_are_told_apart_by_all_parts_of_their_fingerprints() -> None:
    """One that tells none is like others that do not."""
    parts = {"kernels": "avx2 1", "torch": "2"}
    found = [
        spec_from_wire("t0", described(fingerprint=one)).fingerprint
        for one in (parts, dict(reversed(parts.items())), parts | {"torch": "3"}, {"kernels": "avx2 1"}, {})
    ]
    assert found[0] == found[1]
    assert len(set(found)) == 4
    assert found[-1] == ""


def described(**fields: object) -> worker_pb2.WorkerDescription:
    sizes = {"page_size": 16, "total_pages": 9, "max_sequence_length": 99, "max_num_batched_tokens": 64}
    return worker_pb2.WorkerDescription(role=worker_pb2.ROLE_TARGET, **sizes, **fields)  # type: ignore[arg-type]
