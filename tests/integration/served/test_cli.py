"""`spool` from end to end, with real workers over tiny models."""

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from tests.support.agreeing_heads import save_agreeing_pair
from tests.support.command_line import Ended, save_tokenizer, spool, spool_here, started, write_lines
from tests.support.renumbered import save_renumbered
from tests.support.tiny_models import save_tiny_pair
from tests.support.waiting import LONG, wait_until

pytestmark = pytest.mark.slow

PROMPTS = [
    {"prompt": "once upon a time"},
    {"id": "chat", "messages": [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello?"}]},
    {"question_id": 7, "turns": ["what is 2 + 2?", "and 3 + 3?"]},
    {"prompt": "x"},
    {"prompt": "the quick brown fox jumps over the lazy dog"},
]
FAST = ("--max-tokens", "12", "--batch-size", "3", "--dtype", "float32", "--threads", "1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    for model in save_tiny_pair("llama", folder):
        save_tokenizer(model)
    save_renumbered(folder / "llama-draft", folder / "renumbered", range(95, -1, -1))
    write_lines(folder / "prompts.jsonl", *PROMPTS)
    return folder


def run(
    folder: Path,
    command: str,
    *arguments: object,
    target: str = "llama-target",
    draft: str = "llama-draft",
    spool: Callable[..., Ended] = spool,
) -> Ended:
    models = (target, "--draft", draft)
    return spool(command, *models, "--prompts", "prompts.jsonl", *FAST, *arguments, cwd=folder)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def answers(path: Path) -> list[str]:
    return [line["text"] for line in lines(path)]


@pytest.fixture(scope="module")
def plain(folder: Path) -> list[str]:
    """The target's own answers."""
    ended = run(folder, "generate", draft="none")
    assert ended.code == 0, ended.err
    (folder / "plain.jsonl").write_text(ended.out)
    return answers(folder / "plain.jsonl")


def test_generation_settings_that_are_not_followed_are_named(folder: Path, tmp_path: Path) -> None:
    model = shutil.copytree(folder / "llama-target", tmp_path / "model")
    (model / "generation_config.json").write_text('{"num_beams": 4, "temperature": 0.5}')
    too_long = ("--max-model-len", "1000000")  # ends before anything is computed
    ended = run(folder, "generate", *too_long, target=str(model), draft="none", spool=spool_here)
    assert ended.code == 2
    assert f"warning: {model}/generation_config.json: num_beams: not followed, so tokens may be others" in ended.err


def test_generate_writes_answers_in_order_whoever_computed_them(folder: Path, plain: list[str]) -> None:
    output = folder / "out.jsonl"
    workers = ("--policy", "ragged", "--batch-size", "2", "--target-replicas", "2")
    ended = run(folder, "generate", "--output", output, *workers, "--json")
    assert ended.code == 0, ended.err
    assert answers(output) == plain
    found = lines(output)
    assert [line["index"] for line in found] == list(range(5))
    assert [line.get("id") for line in found] == [None, "chat", 7, None, None]
    assert all(len(line["tokens"]) == 12 and line["finish_reason"] == "length" for line in found)
    assert all(len(line["text"]) == 12 for line in found)
    assert ended.out.count("\n") == 1
    summary = ended.summary
    assert summary["sequences"] == summary["finished"] == 5
    assert summary["tokens"] == 60
    assert 1 <= summary["committed_per_round"] <= 5
    assert summary["tokens_per_second"] > 0
    shares = ("equal_length", "target_busy", "lost", "waiting", "realignment", "drafting", "scheduling")
    for name in (f"{share}_share" for share in shares):
        assert 0 <= summary[name] <= 1
    assert "generating: 5/5 sequences, " in ended.err


def test_generate_goes_on_where_it_stopped(folder: Path, plain: list[str]) -> None:
    whole, part = folder / "plain.jsonl", folder / "part.jsonl"

    def generate(*arguments: str, **how: Any) -> Ended:
        return run(folder, "generate", "--output", part, *arguments, draft="none", **how)

    assert generate("--limit", "2").code == 0
    with part.open("a") as file:
        file.write('{"index": 2, "text": "cut sho')
    ended = generate("--json")
    assert ended.code == 0, ended.err
    assert ended.summary["kept"] == 2
    assert ended.summary["finished"] == 3
    assert part.read_text() == whole.read_text()
    assert answers(part) == plain
    # A second run has nothing to do and starts no workers.
    ended = generate("--json", spool=spool_here)
    assert (ended.summary["kept"], ended.summary["tokens"]) == (5, 0)
    assert part.read_text() == whole.read_text()


def test_generate_does_not_mix_runs(folder: Path, plain: list[str]) -> None:
    output = folder / "plain.jsonl"
    before = output.read_text()
    for arguments, message in (
        (("--seed", "1"), "plain.jsonl:1 was written with other settings"),
        (("--max-tokens", "5"), "plain.jsonl:1 was written with other settings"),
        (("--limit", "1"), "plain.jsonl:2 answers a prompt that is not among the 1 given"),
    ):
        ended = run(folder, "generate", "--output", output, *arguments, draft="none", spool=spool_here)
        assert (ended.code, message in ended.err) == (2, True), ended.err
    write_lines(folder / "changed.jsonl", {"prompt": "once upon a mattress"}, *PROMPTS[1:])
    ended = run(folder, "generate", "--output", output, "--prompts", "changed.jsonl", draft="none", spool=spool_here)
    assert (ended.code, "plain.jsonl:1 answers another prompt" in ended.err) == (2, True)
    assert output.read_text() == before


@pytest.mark.parametrize("kind", ["eagle", "mtp"])
def test_verify_finds_a_drafting_head_exact(tmp_path: Path, kind: str) -> None:
    target, head = save_agreeing_pair(tmp_path, kind)
    save_tokenizer(target)
    write_lines(tmp_path / "prompts.jsonl", *PROMPTS)
    both = ("--policy", "exspec", "--policy", "auto")
    ended = run(tmp_path, "verify", *both, "--json", target=target.name, draft=head)
    assert ended.code == 0, ended.err
    policies = json.loads(ended.out.splitlines()[-1])["policies"]
    for found in (policies["exspec"], policies["auto"]):
        assert (found["exact_match"], found["logits_bit_equal"]) == (1, 1)
        assert found["statistics"]["accepted"] > 0


def test_a_draft_in_targets_has_no_replicas_and_runs_beside_whole_targets(tmp_path: Path) -> None:
    target, head = save_agreeing_pair(tmp_path)
    save_tokenizer(target)
    for draft, inside, why in (
        (head, (), f"{head} is a drafting head"),
        (target.name, ("--draft-in", "targets"), "models.draft_in is targets"),
    ):
        for option, reason in (
            ("--draft-replicas", f"must be unset: {why}, so that the targets' workers draft"),
            ("--tensor-parallel-size", f"tensor_parallel_size is 2, must be 1: the draft {draft}"),
        ):
            for command in (("generate",), ("serve", "--no-ray")):
                ended = spool_here(*command, target, "--draft", draft, *inside, option, 2)
                assert (ended.code, reason in ended.err) == (2, True), ended.err


@pytest.mark.parametrize("where", ["workers", "targets"])
def test_verify_finds_speculation_exact(folder: Path, where: str) -> None:
    policies = ("--policy", "exspec", "--policy", "auto", "--draft-in", where)
    ended = run(folder, "verify", *policies, "--json", draft="renumbered")
    assert ended.code == 0, ended.err
    summary = ended.summary
    assert summary["exact_match"] == summary["logits_bit_equal"] == 1
    assert (summary["sequences"], summary["tokens"]) == (5, 60)
    assert list(summary["policies"]) == ["exspec", "auto"]
    for policy, outcome in summary["policies"].items():
        assert outcome["compared_logits"] == outcome["equal_logits"] == 60
        assert outcome["first_divergence"] is None
        # AUTO may find that drafts do not pay off within so few tokens; those of busy workers may all come too late.
        assert policy == "auto" or where == "workers" or outcome["statistics"]["accepted"] > 0
    assert "exspec: 5 of 5 texts are those of plain decoding, 60 of 60 logits" in ended.err


def test_verify_says_what_it_proves(folder: Path) -> None:
    """By default with drafts. Where nothing was drafted, equal texts prove nothing."""
    ended = run(folder, "verify")
    assert ended.code == 0, ended.err
    first, *_, last = ended.out.splitlines()
    assert first.startswith("ragged: 5 of 5 texts are those of plain decoding, 60 of 60 logits, ")
    assert (first.endswith(" of rows in equal-length groups"), last) == (True, "exact: yes")
    ended = run(folder, "verify", "--max-tokens", "1")
    assert ended.code == 1, ended.err
    _, proof, last = ended.out.splitlines()
    assert proof == "ragged: nothing was drafted: this proves nothing"
    assert last == "exact: not shown, nothing was drafted"


def at_work(
    folder: Path, draft: str, prompts: str, output: Path, *arguments: str
) -> AbstractContextManager[subprocess.Popen[str]]:
    """`spool generate` with a draft worker, running."""
    command = ("generate", "llama-target", "--draft", draft, "--draft-in", "workers", "--prompts", prompts)
    return started(*command, "--output", output, *FAST, *arguments, cwd=folder)


def children(process_id: int) -> list[int]:
    listed = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(process_id)], capture_output=True, text=True, check=False
    )
    return [int(line) for line in listed.stdout.split()]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_run_that_is_ended_leaves_no_workers_and_can_go_on(folder: Path, number: signal.Signals) -> None:
    output = folder / f"{number.name}.jsonl"
    write_lines(folder / "many.jsonl", *PROMPTS * 40)
    with at_work(folder, "llama-draft", "many.jsonl", output, "--max-tokens", "100") as process:
        wait_until(lambda: output.exists() and bool(output.read_bytes()), "the first answer")
        workers = children(process.pid)
        assert len(workers) == 2
        process.send_signal(number)
        error = process.communicate(timeout=2 * LONG)[1]
    assert process.returncode in (128 + number, -number), error
    assert "Traceback" not in error
    wait_until(lambda: not any(Path(f"/proc/{worker}/cmdline").exists() for worker in workers), "no worker is left")
    kept = [json.loads(line)["index"] for line in output.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
    assert kept == list(range(len(kept)))


def test_workers_that_die(folder: Path) -> None:
    """Without its draft worker the run goes on without speculation; without its last target it ends with one line."""
    output = folder / "killed.jsonl"
    write_lines(folder / "more.jsonl", *PROMPTS * 40)
    with at_work(folder, "llama-draft", "more.jsonl", output, "--max-tokens", "60") as process:
        for role in ("draft", "target"):
            before = output.read_bytes() if output.exists() else b""
            wait_until(lambda: output.exists() and output.read_bytes() != before, "another answer")  # noqa: B023
            for worker in children(process.pid):
                if f"--role\0{role}\0" in Path(f"/proc/{worker}/cmdline").read_text():
                    os.kill(worker, signal.SIGKILL)
        error = process.communicate(timeout=2 * LONG)[1]
    assert "Traceback" not in error
    assert "draft-0: died: killed by signal 9" in error
    assert process.returncode == 1
    assert error.splitlines()[-1] == "spool: target-0 died: killed by signal 9; no target worker is left"
