"""An output that the request expects is proposed in place of what drafts or heads propose."""

from __future__ import annotations

import pytest

from spool.scheduler.config import Policy
from spool.scheduler.messages import EmitTokens, Role, SequenceRequest
from tests.unit.scheduler.driver import Driver, check_to_the_end, of_type, outputs, plain_decoding, prompt_of

PROMPT, COUNT = 3, 40


def right_output(sequence_id: int) -> tuple[int, ...]:
    return tuple(plain_decoding(SequenceRequest(sequence_id, prompt_of(sequence_id, PROMPT), COUNT))[0])


@pytest.mark.parametrize("policy", list(Policy))
@pytest.mark.parametrize("proposer", ["none", "head", "draft"])
def test_whatever_is_expected_the_output_is_the_same(policy: Policy, proposer: str) -> None:
    driver = Driver(policy=policy, batch_size=3, draft_length=2)
    driver.join("target", head="head" if proposer == "head" else "", guess=0.0)
    if proposer == "draft":
        driver.join("draft", Role.DRAFT)
    driver.submit(1, PROMPT, COUNT, expected_output=right_output(1), draft_length=12)
    wrong = [*right_output(2)]
    wrong[9] = (wrong[9] + 1) % 50
    driver.submit(2, PROMPT, COUNT, expected_output=tuple(wrong), draft_length=12)
    driver.submit(3, PROMPT, COUNT, expected_output=right_output(3)[:20])
    driver.settle()
    check_to_the_end(driver, 1, 2, 3)
    # Nothing is learnt from it.
    assert driver.core.snapshot().draft_lengths.keys() == {0}
    rounds = [
        [(one.drafted, one.accepted) for one in of_type(driver.log, EmitTokens) if one.sequence_id == number]
        for number in (1, 2, 3)
    ]
    assert rounds[0] == [(0, 0), (12, 12), (12, 12), (12, 12)]
    assert rounds[1] == [(0, 0), (12, 8), (12, 12), (12, 12), rounds[1][-1]]
    # A row that is sent before it is known how far the one before it gets may verify the last token, too.
    assert rounds[1][-1] in ((3, 3), (4, 4))
    assert rounds[2][:7] == [(0, 0), *6 * [(2, 2)]]
    assert tuple(outputs(driver, 1)) == right_output(1)
