"""EAGLE-3 heads and MTP layers beside real targets: what they propose, that the text stays, and which are refused."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from spool.engine.drafting.head import DraftingHead
from spool.engine.drafting.head_passes import HeadPasses
from spool.engine.drafting.proposer import Proposer
from spool.engine.drafting.sequence import SequenceDrafting
from spool.engine.errors import UnsupportedModelError
from spool.engine.kv.pages import PagePool, PageTable
from spool.engine.models import loading
from spool.engine.models.loading import load_draft_engine, load_target_engine
from spool.engine.passes.graphed import GraphedPasses
from spool.engine.sampling.noise import gumbel, row_key
from spool.engine.settings import EngineSettings
from spool.engine.steps import VerifyRow
from spool.engine.target import TargetEngine
from spool.scheduler.config import Policy, SchedulerConfig
from spool.scheduler.messages import SequenceRequest
from spool.scheduler.sampling import SamplingParameters
from spool.scheduler.state.digests import DigestedTokens
from spool.services.worker.executor import StepExecutor
from tests.support.agreeing_heads import save_agreeing_pair
from tests.support.decoding import generated
from tests.support.eagle_heads import ReferenceEagle, head_config, head_tensors, save_head
from tests.support.gpu_work import Captures, Work
from tests.support.in_process import Output, executor_of, run_in_process
from tests.support.mtp_heads import FAMILIES, ReferenceMtp, save_target
from tests.support.reference_heads import ReferenceHead
from tests.support.tiny_models import TORCH_SHAPE, VOCABULARY, quantize_to_int8, tiny_model
from tests.support.triton_kernel import interpreted_attention

LAYERS = 4
AUXILIARY = "eagle_aux_hidden_state_layer_ids"
SQUARE, NO_NUMBERS = torch.zeros(64, 64), torch.full((64,), math.nan)
GREEDY = SamplingParameters()
NO_VECTORS = TORCH_SHAPE | {"head_dim": 32}
"""Whole layers by kernel have other sizes, and heads are not filled up, as on a GPU."""
CASES = {
    "torch": ("llama", TORCH_SHAPE, {}),
    "of no vectors": ("llama", NO_VECTORS, {}),
    "kernels": ("llama", {}, {}),
    "norm_before_residual": ("qwen3", {}, {"norm_before_residual": True}),
    "experts, all tokens": ("qwen3_moe", {}, {"draft_vocab_size": VOCABULARY}),
    "mtp": ("mimo", {}, {}),
    "mtp of torch": ("mimo", TORCH_SHAPE, {}),
    "mtp of no vectors": ("mimo", NO_VECTORS, {}),
    "mtp with experts": ("glm4_moe", {}, {}),
    "mtp with experts of torch": ("glm4_moe", TORCH_SHAPE | {"use_qk_norm": True}, {}),
}


def load(folder: Path, head: Path | str | None, **settings: Any) -> TargetEngine:
    chosen: dict[str, Any] = {"dtype": "float32", "kv_pages": 64, "threads": 1, "exact": False} | settings
    draft_head = None if head is None else str(head)
    return load_target_engine(EngineSettings(str(folder), draft_head=draft_head, **chosen), lambda *_: None)


def pair(folder: Path, family: str, shape: dict[str, int], **fields: Any) -> tuple[Path, str, ReferenceHead]:
    """With a head of EAGLE-3, or of a family that has one, an MTP layer."""
    if family in FAMILIES:
        target = save_target(folder / "target", family, LAYERS, **shape)
        return folder / "target", "mtp", ReferenceMtp(folder / "target", target)
    target = tiny_model(family, num_hidden_layers=LAYERS, **shape)
    target.save_pretrained(folder / "target")
    config = head_config(target, **fields)
    head = save_head(folder / "head", config, head_tensors(config))
    return folder / "target", str(head), ReferenceEagle(head, target)


class Follower:
    """One sequence of an engine, fed as a worker feeds it. Its proposals are those of the engine's head, or of another
    `proposer`."""

    def __init__(
        self,
        engine: TargetEngine,
        prompt: Sequence[int],
        sampling: SamplingParameters = GREEDY,
        proposer: Proposer | None = None,
    ) -> None:
        self.engine, self.sampling, self.prompt_length = engine, sampling, len(prompt)
        self.known, self.table, self.drafting = list(prompt), PageTable(), SequenceDrafting()
        self.proposer = proposer or engine.head

    def row(self, drafts: Sequence[int] = (), length: int = 4, chunk: int = 1000) -> VerifyRow:
        start = self.table.length
        end = min(len(self.known), start + chunk)
        samples = end == len(self.known)
        tokens, history = self.known[start:end], self.known[:end]
        row = VerifyRow(self.table, tokens, list(drafts), samples, history, self.prompt_length, self.sampling)
        row.draft_length, row.drafting = length, self.drafting
        return row

    def step(self, drafts: Sequence[int] = (), length: int = 4, chunk: int = 1000) -> Sequence[int]:
        return step_together([self], [self.row(drafts, length, chunk)])[0]


def step_together(followers: Sequence[Follower], rows: Sequence[VerifyRow]) -> list[Sequence[int]]:
    """A step of all of them, and what is proposed for each behind it."""
    outcomes = followers[0].engine.step(rows).rows
    digests = []
    for follower, row, outcome in zip(followers, rows, outcomes, strict=True):
        assert outcome.error is None
        follower.known += outcome.tokens
        row.history = follower.known[: follower.table.length]
        fed = len(row.history) + bool(outcome.tokens)
        digests.append(DigestedTokens(follower.known[:fed]).digest(fed))
    proposer = followers[0].proposer
    if proposer is not None:
        proposer.offer(rows, outcomes, digests)
    return [one.drafting.kept(digest, 1000) for one, digest in zip(followers, digests, strict=True)]


def with_graphs(
    monkeypatch: pytest.MonkeyPatch, longest: int = 1000, row_counts: Sequence[int] = (1, 2, 4, 512)
) -> Captures:
    """Heads are loaded as for a GPU, with its attention, by the interpreter, and graphs of these row counts, but for
    those that are too large."""
    attention, captures = interpreted_attention(), Captures()

    def head_passes(head: DraftingHead, pool: PagePool, *_: object) -> HeadPasses:
        kv = head.kv(pool.total_pages, pool.page_size)
        backend = attention.TritonBackend(*head.heads[:2], pool.page_size, torch.device("cpu"))
        passes = HeadPasses(head, kv, backend, lambda compute: GraphedPasses(compute, kv, backend, captures))
        passes.capture(row_counts, longest, lambda *_: None)
        return passes

    monkeypatch.setattr(loading, "head_passes", head_passes)
    return captures


@pytest.mark.sampled(3, 1)
@pytest.mark.parametrize("longest", [1000, 45])
@pytest.mark.parametrize("case", ["of no vectors", "mtp of no vectors", "experts, all tokens"])
def test_graphs_propose_what_a_head_proposes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, longest: int
) -> None:
    """Also in turns with passes that have none, as a sequence of theirs has become too long."""
    captures = with_graphs(monkeypatch, longest)
    test_proposals_are_those_of_the_published_description(tmp_path, case)
    assert captures.captured == 3
    assert captures.replays > 10


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParameters(presence_penalty=0.5, logit_bias={3: 1.0})])
def test_the_host_waits_once_for_a_proposal_of_graphs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sampling: SamplingParameters
) -> None:
    captures, (target, head, _) = with_graphs(monkeypatch), pair(tmp_path, "llama", NO_VECTORS)
    engine = load(target, head)
    followers = [Follower(engine, range(number, 9), sampling) for number in range(3)]
    rows = [follower.row(length=3 + number) for number, follower in enumerate(followers)]
    outcomes = engine.step(rows).rows
    for follower, row, outcome in zip(followers, rows, outcomes, strict=True):
        row.history = [*follower.known, *outcome.tokens][: row.table.length]
    assert engine.head is not None
    with monkeypatch.context() as patch, Work(patch) as captures.work:
        engine.head.offer(rows, outcomes, [1, 2, 3])
    assert [len(row.drafting.kept(1 + number, 9)) for number, row in enumerate(rows)] == [3, 4, 5]
    assert captures.replays == 5
    assert captures.work.waits == 1


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.slow if "torch" in case or "vectors" in case else []) for case in CASES],
)
def test_proposals_are_those_of_the_published_description(tmp_path: Path, case: str) -> None:
    family, shape, fields = CASES[case]
    target_folder, head, reference = pair(tmp_path, family, shape, **fields)
    engine, rng = load(target_folder, head), random.Random(1)
    followers = [Follower(engine, rng.choices(range(VOCABULARY), k=length)) for length in (5, 16, 17, 40)]
    for follower in followers:
        while follower.table.length + 7 < len(follower.known):
            assert not follower.step(chunk=7)
    compared = 0
    for _ in range(14):
        rows = []
        for follower in followers:
            right = generated(reference.target, follower.known, 3)[: rng.randrange(4)]
            drafts = [*right, *rng.choices(range(VOCABULARY), k=2)][: rng.randrange(5)]
            rows.append(follower.row(drafts, rng.choice((0, 1, 4))))
        for row, follower, proposal in zip(rows, followers, step_together(followers, rows), strict=True):
            assert list(proposal) == reference.proposal(follower.known, row.draft_length)
            compared += len(proposal)
    assert compared > 60
    assert max(len(follower.known) for follower in followers) > 60


def test_drawn_proposals_have_the_noise_of_the_target(tmp_path: Path) -> None:
    """The first token of each is the largest sum of the head's log probability and the noise at its position."""
    target_folder, head, reference = pair(tmp_path, "llama", {})
    sampling = SamplingParameters(temperature=0.7, seed=5)
    follower = Follower(load(target_folder, head), range(9), sampling)
    for _ in range(12):
        (token,) = follower.step(length=1)
        logits = reference.logits(follower.known)
        position = len(follower.known)
        ids = torch.tensor(sorted(logits))
        scores = torch.tensor([logits[one] for one in ids.tolist()]) / sampling.temperature
        keys = torch.full_like(ids, row_key(sampling.seed, position))
        assert token == int(ids[(scores + gumbel(keys, ids)).argmax()])


@pytest.mark.parametrize("family", ["llama", "glm4_moe"])
def test_a_head_begins_a_new_context_behind_kv_that_came_without_its_own(tmp_path: Path, family: str) -> None:
    target_folder, head, reference = pair(tmp_path, family, {})
    source, destination = load(target_folder, head), load(target_folder, head)
    prompt = random.Random(3).choices(range(VOCABULARY), k=21)
    before, after = Follower(source, prompt), Follower(destination, prompt)
    # Other KV of the head is left on the pages.
    stale = Follower(destination, range(40))
    stale.step()
    destination.pool.free(stale.table)
    before.step()
    destination.pool.append(after.table, before.table.length)
    destination.kv_store.write_pages(after.table.pages, source.kv_store.read_pages(before.table.pages))
    after.known = list(before.known)
    proposals = []
    while len(after.known) < 60:
        before.step()
        proposals.append(after.step())
        assert after.known == before.known
        # Pages hold 16 positions: on the second one, the head has nothing to go on from.
        if len(after.known) <= 33:
            assert not proposals[-1]
        else:
            assert proposals[-1] == reference.proposal(after.known, 4, first=32)
    assert len(proposals) > 20


def requests(temperature: float = 0.8) -> list[SequenceRequest]:
    return [
        SequenceRequest(
            number,
            tuple((7 * number + place * place) % VOCABULARY for place in range(5 + 11 * number)),
            50,
            sampling=SamplingParameters(temperature=temperature * (number % 2), seed=number),
            logits_digests=True,
        )
        for number in range(1, 10)
    ]


def worker(folder: Path, head: str | None, dtype: str) -> StepExecutor:
    engine = load(folder, head, dtype=dtype, kv_pages=200, exact=True)
    return executor_of(engine, kv_store=engine.kv_store)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", ["llama", "glm4_moe", "mimo", "eagle", "mtp", "dflash"])
def test_text_and_bits_of_logits_are_those_without_a_head(tmp_path: Path, dtype: str, kind: str) -> None:
    agrees = kind in ("eagle", "mtp", "dflash")
    target, head = save_agreeing_pair(tmp_path, kind) if agrees else pair(tmp_path, kind, {})[:2]
    expected = run_in_process(SchedulerConfig(draft_length=0), {"target": worker(target, None, dtype)}, requests())
    with_head = worker(target, head, dtype)
    for policy in (Policy.EXSPEC, Policy.AUTO):
        got = run_in_process(SchedulerConfig(policy=policy, batch_size=4), {"target": with_head}, requests())
        assert [text(one) for one in got.values()] == [text(one) for one in expected.values()]
        drafted, accepted = (sum(count[at] for one in got.values() for count in one.rounds) for at in (0, 1))
        assert drafted > 0
        assert accepted > 0.9 * drafted if agrees else accepted < drafted


def text(output: Output) -> tuple[list[int], list[int], str | None]:
    return output.tokens, output.logits_digests, output.error


def test_a_step_without_free_pages_proposes_less_and_takes_none(tmp_path: Path) -> None:
    target, head, _ = pair(tmp_path, "llama", {})
    follower = Follower(engine := load(target, head, kv_pages=2), range(30))
    assert [len(follower.step()) for _ in range(3)] == [3, 2, 1]
    engine.pool.check_conservation([follower.table])


@pytest.mark.parametrize("family", ["llama", "mimo"])
def test_logits_of_the_head_that_are_not_finite_end_a_proposal(tmp_path: Path, family: str) -> None:
    if family == "mimo":
        huge, target = {"mlp.down_proj.weight": torch.full((64, 96), 1e38)}, tmp_path / "target"
        model, head = save_target(target, family, LAYERS, huge), "mtp"
    else:
        target, _, reference = pair(tmp_path, family, {})
        model, config = reference.target, head_config(reference.target)
        tensors = head_tensors(config)
        tensors["midlayer.mlp.down_proj.weight"] *= 1e38
        head = str(save_head(tmp_path / "huge", config, tensors))
    follower = Follower(load(target, head), range(20))
    assert not any(follower.step() for _ in range(20))
    assert follower.known[20:] == generated(model, range(20), 20)


@pytest.mark.parametrize(
    ("family", "fields", "tensors", "reason"),
    [
        ("llama", {"architectures": ["LlamaForCausalLM"]}, {}, "must be LlamaForCausalLMEagle3"),
        ("llama", {"hidden_size": 128}, {}, "hidden_size is 128, must be 64"),
        ("llama", {"vocab_size": 100}, {}, "vocab_size is 100, must be 96"),
        ("llama", {"num_hidden_layers": 2}, {}, "must have 1"),
        ("llama", {"hidden_act": "nope"}, {}, r"config\.json cannot be used: llama has hidden_act 'nope'"),
        ("llama", {"head_dim": 0}, {}, r"config\.json cannot be used: llama has head_dim 0, must be at least 1"),
        (
            "llama",
            {"num_attention_heads": 3},
            {},
            r"config\.json cannot be used: .*multiple of the number of attention",
        ),
        ("llama", {AUXILIARY: [0, 1, 4]}, {}, r"layers \[0, 1, 4\], must be 3 of the target's 4"),
        ("llama", {AUXILIARY: None}, {}, r"layers \[2, 2, 1\], must be 3 of the target's 4"),
        ("llama", {"norm_before_fc": True}, {}, "norm_before_fc is True"),
        ("llama", {"norm_output": True}, {}, "norm_output is True"),
        ("llama", {}, {"fc.weight": None}, "holds no fc.weight"),
        ("llama", {}, {"fc.weight": SQUARE}, r"fc.weight has the shape \[64, 64\], must have \[64, 192\]"),
        ("llama", {}, {"norm.weight": NO_NUMBERS}, "norm.weight holds a value that is not a finite number"),
        ("llama", {}, {"midlayer.extra": torch.zeros(1)}, "holds midlayer.extra, which its configuration has no"),
        (
            "llama",
            {},
            {"fc.weight": torch.zeros(64, 192).to(torch.float8_e4m3fn)},
            "fc.weight is of dtype float8_e4m3fn",
        ),
        ("llama", {}, {"norm.weight": torch.ones(64).int()}, "norm.weight is of dtype int32"),
        (
            "llama",
            {},
            {"fc.weight_scale": torch.ones(1)},
            "holds fc.weight_scale, which its configuration has no",
        ),
        ("llama", {}, {"d2t": None}, "holds no d2t"),
        ("llama", {}, {"d2t": torch.arange(48).flip(0) * 2}, "in ascending order"),
        ("llama", {}, {"d2t": torch.full((48,), 49)}, "must name tokens of the target's 96"),
        ("llama", None, {}, "llama has no MTP layer that is known, must be glm4_moe or mimo"),
        ("glm4_moe", None, {}, "holds no MTP layer, whose tensors begin with model.layers.4."),
        ("glm4_moe", {}, {"enorm.weight": None}, "the MTP layer of target holds no enorm.weight"),
        ("glm4_moe", {}, {"eh_proj.weight": SQUARE}, r"\[64, 64\], must have \[64, 128\] by config.json"),
        ("glm4_moe", {}, {"mlp.experts.3.up_proj.weight": None}, "the MTP layer of target cannot be loaded"),
        ("mimo", {}, {"self_attn.q_proj.bias": NO_NUMBERS.repeat(2)}, "q_proj.bias holds a value that is not a fin"),
        ("mimo", {}, {"final_layernorm.weight": None}, "holds no final_layernorm.weight"),
        (
            "mimo",
            {},
            {"self_attn.o_proj.bias": torch.ones(64)},
            "o_proj.bias, which its configuration has no",
        ),
        ("mimo", {}, {"input_proj.weight_scale": torch.ones(1)}, r"mtp_layers\.0\.input_proj\.weight_scale, which its"),
        ("glm4_moe", {}, {"eh_proj.weight_scale": torch.ones(1)}, r"layers\.4\.eh_proj\.weight_scale, which its"),
        ("glm4_moe", {}, {"enorm.bias": torch.ones(64)}, "enorm.bias, which its configuration has no place for"),
    ],
)
def test_a_head_that_does_not_fit_is_refused(
    tmp_path: Path,
    family: str,
    fields: dict[str, Any] | None,
    tensors: dict[str, torch.Tensor | None],
    reason: str,
) -> None:
    """`fields`: None asks for the MTP layer of a target without one."""
    folder, head = tmp_path / "target", "mtp"
    if fields is None:
        tiny_model(family, num_hidden_layers=LAYERS).save_pretrained(folder)
    elif family in FAMILIES:
        save_target(folder, family, LAYERS, tensors)
    else:
        config = head_config(pair(tmp_path, family, {})[2].target)
        changed = {name: one for name, one in (head_tensors(config) | tensors).items() if one is not None}
        config = {name: value for name, value in (config | fields).items() if value is not None}
        head = str(save_head(tmp_path / "changed", config, changed))
    with pytest.raises(UnsupportedModelError, match=reason):
        load(folder, head)


@pytest.mark.parametrize("family", ["llama", "mimo"])
def test_what_a_head_does_not_take_may_be_left_out(family: str, tmp_path: Path) -> None:
    extra = {"extra.weight": torch.ones(1), "self_attn.rotary_emb.inv_freq": torch.ones(1)}
    folder, head = tmp_path / "target", "mtp"
    if family in FAMILIES:
        save_target(folder, family, LAYERS, extra)
    else:
        config = head_config(pair(tmp_path, family, {})[2].target)
        head = str(save_head(tmp_path / "changed", config, head_tensors(config) | extra))
    with pytest.raises(UnsupportedModelError, match=r"extra\.weight"):
        load(folder, head)
    load(folder, head, ignore_tensors=("*extra.weight",))


def test_an_mtp_layer_of_a_quantised_checkpoint_is_expanded(tmp_path: Path) -> None:
    target = save_target(tmp_path, "mimo", LAYERS)
    numbers = quantize_to_int8(tmp_path)
    target.load_state_dict(numbers, strict=False)
    reference, follower = ReferenceMtp(tmp_path, target, numbers), Follower(load(tmp_path, "mtp"), range(20))
    for _ in range(10):
        assert follower.step() == reference.proposal(follower.known, 4)


def test_layers_that_eagle_config_names_are_those_before_and_pickled_weights_are_read(tmp_path: Path) -> None:
    target_folder, head, reference = pair(tmp_path, "llama", {}, **{AUXILIARY: [1, 2, 3]})
    config = head_config(reference.target, eagle_config={AUXILIARY: [0, 1, 2]})
    del config[AUXILIARY]
    other = save_head(tmp_path / "other", config, {})
    (other / "model.safetensors").unlink()
    torch.save(head_tensors(config), other / "pytorch_model.bin")
    first, second = (Follower(load(target_folder, one), range(12)) for one in (head, other))
    assert first.step() == second.step() != []


def test_a_head_is_no_draft_and_goes_with_whole_targets_only(tmp_path: Path) -> None:
    target_folder, head, _ = pair(tmp_path, "llama", {})
    settings = EngineSettings(head, dtype="float32")
    with pytest.raises(UnsupportedModelError, match="runs in the target's worker, not in a draft worker"):
        load_draft_engine(settings, lambda *_: None)
    with pytest.raises(ValueError, match=f"tensor_parallel_size is 2, must be 1 with {head}"):
        replace(settings, model=str(target_folder), draft_head=head, tensor_parallel_size=2)
