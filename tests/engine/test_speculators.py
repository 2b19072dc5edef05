"""Drafters in the format of speculators beside real targets: what they propose is what the package itself proposes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from spool.engine.drafting.head_passes import HeadPasses
from spool.engine.errors import UnsupportedModelError
from spool.engine.kv.pages import PageTable
from spool.engine.models.drafting_head import is_drafting_head
from spool.engine.passes.layout import TokenBatch
from spool.scheduler.config import Policy, SchedulerConfig
from tests.engine.test_drafting_head import (
    AUXILIARY,
    Follower,
    load,
    requests,
    step_together,
    text,
    with_graphs,
    worker,
)
from tests.support.decoding import generated
from tests.support.in_process import run_in_process
from tests.support.speculator_heads import PROMPTS, fixed_prompt, fixed_target, golden_cases, save_drafter
from tests.support.tiny_models import VOCABULARY

GOLDEN = golden_cases()
ROW_COUNTS = (1, 8, 32)
"""Of graphs."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    fixed_target().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("graphed", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", GOLDEN)
def test_proposals_and_logits_are_those_of_the_package(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, graphed: bool
) -> None:
    case, passes = GOLDEN[name], list[Tensor]()
    captures = with_graphs(monkeypatch, row_counts=ROW_COUNTS) if graphed else None
    run = HeadPasses.run

    def seen(self: HeadPasses, batch: TokenBatch) -> Tensor:
        passes.append(run(self, batch).clone())
        return passes[-1]

    monkeypatch.setattr(HeadPasses, "run", seen)
    engine = load(target, head := save_drafter(tmp_path / "drafter", case))
    assert is_drafting_head(str(head))
    for length, proposal in zip(PROMPTS, case["proposals"], strict=True):
        follower = Follower(engine, fixed_prompt(length))
        while length - follower.table.length > 7:
            assert not follower.step(chunk=7)
        passes.clear()
        assert follower.step(length=len(proposal)) == proposal
    torch.testing.assert_close(torch.cat(passes), torch.tensor(case["logits"]), rtol=1e-3, atol=1e-3)
    if captures is not None:
        assert captures.replays >= len(passes)


@pytest.mark.parametrize(
    ("name", "graphed"),
    [
        *((name, False) for name in GOLDEN),
        *(pytest.param(n, True, marks=pytest.mark.slow) for n in ("peagle", "dflash")),
    ],
)
def test_verified_tokens_leave_the_drafter_as_their_text_in_a_prompt_does(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, graphed: bool
) -> None:
    """Accepted, rejected, and of several sequences in one pass."""
    if graphed:
        with_graphs(monkeypatch, row_counts=ROW_COUNTS)
    engine, rng = load(target, save_drafter(tmp_path / "drafter", GOLDEN[name])), random.Random(1)
    followers = [Follower(engine, fixed_prompt(length)) for length in PROMPTS]
    model = fixed_target()
    for _ in range(6):
        rows = []
        for follower in followers:
            right = generated(model, follower.known, 3)[: rng.randrange(4)]
            rows.append(follower.row([*right, rng.randrange(VOCABULARY)], rng.choice((1, 3, 4))))
        for row, follower, proposal in zip(rows, followers, step_together(followers, rows), strict=True):
            fresh = Follower(engine, follower.known[:-1])
            assert fresh.step(length=row.draft_length) == proposal
            assert fresh.known == follower.known
            engine.pool.free(fresh.table)


def test_text_is_that_without_a_drafter(target: Path, tmp_path: Path) -> None:
    """Its bits, too, in exact mode."""
    expected = run_in_process(SchedulerConfig(draft_length=0), {"target": worker(target, None, "bfloat16")}, requests())
    for number, case in enumerate(GOLDEN.values()):
        drafter = save_drafter(tmp_path / str(number), case)
        config = SchedulerConfig(policy=Policy.AUTO, batch_size=4)
        got = run_in_process(config, {"target": worker(target, str(drafter), "bfloat16")}, requests())
        assert [text(one) for one in got.values()] == [text(one) for one in expected.values()]
        assert sum(drafted for one in got.values() for drafted, _ in one.rounds) > 0


ONES, LAYER = torch.ones(64), "transformer_layer_config"
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 500.0}
REFUSED: list[tuple[str, dict[str, Any], dict[str, Tensor | None], str]] = [
    ("eagle3", {"speculators_model_type": "medusa"}, {}, "speculators_model_type is medusa, must be eagle3"),
    ("eagle3", {"new_norm": False}, {}, r"config\.json has new_norm, which is not known"),
    ("eagle3", {f"{LAYER}.qk_clip": 1}, {}, rf"config\.json has {LAYER}\.qk_clip, which is not known"),
    ("eagle3", {"speculators_config.ttt": 1}, {}, r"config\.json has speculators_config\.ttt, which is not known"),
    (
        "eagle3",
        {f"{LAYER}.rope_parameters.partial_rotary_factor": 0.5},
        {},
        rf"has {LAYER}\.rope_parameters\.partial_rotary_factor, which is not known",
    ),
    ("eagle3", {f"{LAYER}.rope_parameters": DYNAMIC}, {}, "positions of type dynamic"),
    ("eagle3", {LAYER: 1}, {}, f"{LAYER} is 1, must be an object"),
    (
        "eagle3",
        {f"{LAYER}.model_type": "qwen3_next"},
        {},
        "model_type is 'qwen3_next', must be llama or qwen3",
    ),
    ("eagle3", {f"{LAYER}.layer_types": ["sliding_attention"]}, {}, "layer_types sliding_attention"),
    ("eagle3", {f"{LAYER}.vocab_size": 100}, {}, "vocab_size is 100, must be 96"),
    ("eagle3", {f"{LAYER}.hidden_act": "nope"}, {}, "hidden_act 'nope'"),
    ("eagle3", {"target_hidden_size": 128}, {}, "target_hidden_size is 128, must be None or 64"),
    ("eagle3", {"draft_vocab_size": None}, {}, "draft_vocab_size is None, must be a number"),
    ("eagle3", {"norm_output": "no"}, {}, "norm_output is 'no', must be False or True"),
    ("eagle3.1", {"norm_before_fc": True}, {}, "fc_norm with norm_before_fc"),
    ("eagle3", {"speculators_config.algorithm": "eagle"}, {}, "algorithm is 'eagle', must be eagle3"),
    ("eagle3", {AUXILIARY: [0, 1, 4]}, {}, r"layers \[0, 1, 4\], must be some of the target's 4"),
    ("eagle3", {AUXILIARY: [3, 1, 0]}, {}, r"layers \[3, 1, 0\], must be some of the target's 4 in order"),
    ("eagle3", {AUXILIARY: [0, 1]}, {}, r"fc.weight has the shape \[64, 192\], must have \[64, 128\]"),
    ("eagle3", {"fc_norm": True}, {}, "holds no fc_norm.0.weight"),
    ("eagle3.1", {"fc_norm": False}, {}, "holds fc_norm.0.weight, fc_norm.1.weight, fc_norm.2.weight, which its"),
    ("eagle3", {"norm_before_fc": True}, {}, "holds no input_norm.weight"),
    ("eagle3", {f"{LAYER}.num_hidden_layers": 2}, {}, "holds no layers.1"),
    ("eagle3.1", {f"{LAYER}.model_type": "llama"}, {}, "k_norm.weight.*, which its configuration has no place for"),
    ("eagle3.1", {}, {"layers.1.self_attn.q_norm.weight": None}, "holds no layers.1.self_attn.q_norm.weight"),
    ("eagle3", {}, {"layers.0.hidden_norm.weight": None}, "holds no layers.0.hidden_norm.weight"),
    ("eagle3", {}, {"lm_head.weight": None}, "holds no lm_head.weight"),
    ("eagle3", {}, {"layers.0.self_attn.q_proj.bias": ONES}, "q_proj.bias, which its configuration has no place for"),
    ("eagle3", {}, {"fc.bias": torch.ones(64)}, "holds fc.bias, which its configuration has no place for"),
    ("eagle3", {f"{LAYER}.mlp_bias": True}, {}, r"holds no layers.0.mlp.down_proj.bias"),
    ("eagle3", {}, {"mask_hidden": torch.ones(1, 1, 192)}, "holds mask_hidden, which its configuration has no place"),
    ("eagle3", {}, {"d2t": None}, "holds no d2t"),
    ("eagle3", {"mask_token_id": 91}, {}, "has mask_token_id, which is not known"),
    ("peagle", {"mask_token_id": None}, {}, "mask_token_id is None, must be a number"),
    ("peagle", {"mask_token_id": 96}, {}, "mask_token_id is 96, must be below 96"),
    ("peagle", {}, {"mask_hidden": None}, "holds no mask_hidden"),
    ("dflash", {"block_size": 1}, {}, "block_size is 1, must be at least 2"),
    ("dflash", {"block_size": "8"}, {}, "block_size is '8', must be a number"),
    ("dflash", {"mask_token_id": 96}, {}, "mask_token_id is 96, must be below 96"),
    ("dflash", {"sample_from_anchor": 1.5}, {}, "sample_from_anchor is 1.5, must be False or True"),
    ("dflash", {"norm_output": True}, {}, "has norm_output, which is not known"),
    ("dflash", {"markov_rank": 4}, {}, "has markov_rank, which is not known"),
    ("dflash", {"aux_hidden_state_layer_ids": None}, {}, "has no aux_hidden_state_layer_ids"),
    ("dflash", {"aux_hidden_state_layer_ids": [0, 4]}, {}, r"layers \[0, 4\], must be some of the target's 4 in order"),
    ("dflash", {f"{LAYER}.model_type": "llama"}, {}, "model_type is 'llama', must be qwen3"),
    ("dflash, windows", {"sliding_window_non_causal": False}, {}, "layer_types sliding_attention, must be full_atten"),
    ("dflash", {}, {"hidden_norm.weight": None}, "holds no hidden_norm.weight"),
    ("dflash", {}, {"layers.1.self_attn.k_norm.weight": None}, "holds no layers.1.self_attn.k_norm.weight"),
    ("dflash", {}, {"lm_head.weight": None}, "holds no lm_head.weight"),
    ("dflash", {}, {"aux_hidden_norms.0.weight": ONES}, "holds aux_hidden_norms.0.weight, which its configuration"),
    ("peagle", {}, {"mask_hidden": ONES.view(1, 1, 64)}, r"mask_hidden has the shape \[1, 1, 64\], must have"),
]


@pytest.mark.parametrize(("name", "config", "tensors", "reason"), REFUSED)
def test_what_is_not_understood_is_refused_by_name(
    target: Path, tmp_path: Path, name: str, config: dict[str, Any], tensors: dict[str, Tensor | None], reason: str
) -> None:
    drafter = save_drafter(tmp_path / "drafter", GOLDEN[name], config, tensors)
    with pytest.raises(UnsupportedModelError, match=reason):
        load(target, drafter)


@pytest.mark.parametrize(("name", "lengths"), [("peagle", [3, 2, 1]), ("dflash", [])])
def test_a_pass_for_all_tokens_proposes_as_many_as_there_is_room_for(
    target: Path, tmp_path: Path, name: str, lengths: list[int]
) -> None:
    """A block that has no room is not computed, and the next one is what it would be."""
    case = GOLDEN[name]
    engine = load(target, save_drafter(tmp_path / "drafter", case), kv_pages=2)
    follower = Follower(engine, fixed_prompt(30))
    for length in lengths or [0, 0, 0]:
        assert len(follower.step()) == length
    engine.pool.check_conservation([follower.table])
    engine.pool.free(follower.table)
    assert Follower(engine, fixed_prompt(PROMPTS[1])).step() == case["proposals"][1]


@pytest.mark.parametrize("name", ["peagle", "dflash"])
def test_a_block_without_room_is_made_up_for(target: Path, tmp_path: Path, name: str) -> None:
    """Its pair is written with the next ones."""
    drafter = save_drafter(tmp_path / "drafter", GOLDEN[name])
    engine, taken = load(target, drafter, kv_pages=3), PageTable()
    follower = Follower(engine, fixed_prompt(29))
    engine.pool.append(taken, 16)
    assert len(follower.step()) < 5
    engine.pool.free(taken)
    proposal = follower.step()
    assert Follower(load(target, drafter), follower.known[:-1]).step() == proposal != []


def test_what_changes_no_proposal_is_taken_and_what_is_ignored_left_out(target: Path, tmp_path: Path) -> None:
    config = {"embed_requires_grad": True, "has_no_defaults_at_init": False, f"{LAYER}.attention_dropout": 0.5}
    tensors = {"t2d": None, "verifier_norm.weight": ONES, "verifier_lm_head.weight": torch.ones(48, 64)}
    case, extra = GOLDEN["eagle3"], {"extra.weight": ONES, "fc.bias": torch.ones(64)}
    engine = load(target, save_drafter(tmp_path / "same", case, config, tensors))
    more = save_drafter(tmp_path / "more", case, {"new_norm": True}, extra)
    ignoring = load(target, more, ignore_tensors=("new_norm", "extra.*", "fc.bias"))
    for one in (engine, ignoring):
        assert Follower(one, fixed_prompt(PROMPTS[-1])).step() == case["proposals"][-1]
