"""Bad input to every command: one line on standard error, exit code 2, no traceback."""

import json
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import typer

from spool.deploy.cli.command_line import app, run
from tests.support.command_line import CHARACTERS, save_tokenizer, spool, spool_here, write_lines


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prompt files of all kinds, and two model folders without real weights: no run gets as far as loading them."""
    folder = tmp_path_factory.mktemp("cli")
    for name in ("target", "other"):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps({"max_position_embeddings": 200}))
        (folder / name / "model.safetensors").write_text("")
        save_tokenizer(folder / name, CHARACTERS if name == "target" else [f"<{number}>" for number in range(96)])
    (folder / "no-weights").mkdir()
    (folder / "no-weights" / "config.json").write_text("{}")
    (folder / "no-tokenizer").mkdir()
    (folder / "no-tokenizer" / "config.json").write_text("{}")
    (folder / "no-tokenizer" / "model.safetensors").write_text("")
    write_lines(folder / "good.jsonl", {"prompt": "hello"})
    write_lines(folder / "bad-json.jsonl", {"prompt": "hello"}, "", '{"prompt": "hel')
    write_lines(folder / "list.jsonl", [1, 2])
    write_lines(folder / "empty.jsonl", "")
    write_lines(folder / "both.jsonl", {"prompt": "a", "turns": ["b"]})
    write_lines(folder / "neither.jsonl", {"question": "a"})
    write_lines(folder / "not-text.jsonl", {"prompt": 3})
    write_lines(folder / "no-content.jsonl", {"messages": [{"role": "user"}]})
    write_lines(folder / "no-turns.jsonl", {"turns": []})
    write_lines(folder / "long.jsonl", {"prompt": "hello"}, {"prompt": "x" * 200})
    (folder / "bad.jinja").write_text("{% for %}")
    (folder / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    return folder


def check(folder: Path, command: str, message: str, *arguments: object) -> None:
    environment = {"SPOOL_CACHE": str(folder / "cache")}
    ended = spool_here(*command.split(), *arguments, cwd=folder, environment=environment)
    assert ended.code == 2, ended.err
    assert message in ended.err
    assert ended.err.startswith("spool: ")
    assert ended.err.count("\n") == 1
    assert ended.out == ""


BAD_INPUT = [
    (["--prompts", "missing.jsonl"], "cannot read missing.jsonl: No such file"),
    (["--prompts", "."], "cannot read .: Is a directory"),
    (["--prompts", "bad-json.jsonl"], "bad-json.jsonl:3: "),
    (["--prompts", "list.jsonl"], "list.jsonl:1: is [1, 2], must be an object"),
    (["--prompts", "empty.jsonl"], "empty.jsonl holds no prompts"),
    (["--prompts", "both.jsonl"], "both.jsonl:1: line has prompt and turns"),
    (["--prompts", "neither.jsonl"], "neither.jsonl:1: line has none of prompt, messages, turns"),
    (["--prompts", "not-text.jsonl"], "not-text.jsonl:1: prompt is 3, must be a valid string"),
    (["--prompts", "no-content.jsonl"], "no-content.jsonl:1: messages.0.content is missing"),
    (["--prompts", "no-turns.jsonl"], "no-turns.jsonl:1: turns is [], List should have at least 1 item"),
    (["--prompts", "binary.jsonl"], "binary.jsonl is not UTF-8 text"),
    (["--limit", "0"], "--limit is 0"),
    (["--policy", "best"], "'best' is not one of 'eqspec', 'exspec', 'ragged', 'auto'"),
    (["--batch-size", "-1"], "batch_size is -1, must be greater than or equal to 1"),
    (["--max-running", "4", "--batch-size", "8"], "max_running is 4, must be at least batch_size, which is 8"),
    (["--draft-length", "65"], "--draft-length: scheduling.draft_length is 65"),
    (["--temperature", "-0.5"], "temperature is -0.5, must be between 0 and 100"),
    (["--temperature", "warm"], "Invalid value for '--temperature'"),
    (["--draft-replicas", "0"], "--draft-replicas: groups.draft.replicas is 0"),
    (["--quantization", "awq"], "'awq' is not one of 'auto', 'none', 'int8', 'int4'"),
    (["/no/such/model"], "target model /no/such/model: no such folder"),
    (["no-weights"], "target model no-weights: the folder holds no weights"),
    (["no-tokenizer"], "holds no tokenizer.json"),
    (["target", "--chat-template", "gone.jinja"], "gone.jinja: No such file or directory"),
    (["target", "--chat-template", "bad.jinja"], "bad.jinja: the model's chat template does not compile: "),
    (["target", "--chat-template", "binary.jsonl"], "binary.jsonl: 'utf-8' codec can't decode"),
    (["good.jsonl"], "good.jsonl is a file"),
    (["target", "--draft", "/no/such/model"], "draft model /no/such/model: no such folder"),
    (
        ["target", "--draft", "other"],
        "the draft other does not fit the target target: 0 tokens are the same in target and other, must be at least "
        "48, half of the smaller vocabulary: the first that differs is 0 of target, '!' (--draft ngram and --draft "
        "none fit any target)",
    ),
    (["target", "--prompts", "long.jsonl"], "long.jsonl:2: the prompt has 200 tokens, the model takes 200"),
    (["target", "--max-model-len", "300"], "max_model_len is 300, must be at most 200, the limit of target"),
    (
        ["target", "--prompts", "good.jsonl", "--max-model-len", "5"],
        "good.jsonl:1: the prompt has 5 tokens, the model takes 5",
    ),
    (["target", "--device", "gpu"], "'gpu' is not one of 'auto', 'cpu', 'cuda'"),
    (["--unknown"], "No such option: --unknown"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_INPUT)
def test_bad_input(folder: Path, arguments: list[str], message: str) -> None:
    """The commands `generate` and `verify` share these options."""
    check(folder, "generate", message, *arguments)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("nonsense", "No such command 'nonsense'"),
        ("models", "Missing command"),
        ("models fetch", "Missing argument 'NAME...'"),
        ("models fetch /no/such/model", "no such folder"),
        ("models fetch demo --unknown", "No such option"),
        ("verify --prompts missing.jsonl", "cannot read missing.jsonl: No such file"),
        ("generate --kv-cache-dtype int4", "'--kv-cache-dtype': 'int4' is not one of 'auto', 'int8'"),
        ("generate target --output /no/such/folder/out.jsonl", "cannot write /no/such/folder/out.jsonl"),
        ("generate target --output .", "cannot read .: Is a directory"),
        ("serve --ssl-certfile cert.pem", "auth.tls.key is missing"),
        ("generate target --output good.jsonl", "good.jsonl:1 is no line of results"),
    ],
)
def test_bad_input_to_one_command(folder: Path, command: str, message: str) -> None:
    check(folder, command, message)


def test_the_version_is_that_of_the_package() -> None:
    ended = spool("--version")
    assert (ended.code, ended.out) == (0, f"spool {version('spool-serve')}\n")


def test_shells_can_complete() -> None:
    words = {"_SPOOL_COMPLETE": "complete_bash", "COMP_WORDS": "spool serve --max-", "COMP_CWORD": "2"}
    ended = spool(environment=words)
    assert set(ended.out.split()) == {"--max-model-len", "--max-running", "--max-num-seqs", "--max-num-batched-tokens"}


def test_help_in_a_narrow_terminal_names_every_option(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    commands: list[tuple[list[str], Any]] = [([], typer.main.get_command(app))]
    for path, command in commands:
        commands += [([*path, name], inner) for name, inner in getattr(command, "commands", {}).items()]
        assert run([*path, "--help"]) == 0
        shown = capsys.readouterr().out
        words = set(re.split(r"[\s,]+", shown))
        assert {name for each in command.params for name in each.opts if name.startswith("-")} <= words
        assert "<bool>" not in shown
        assert all(len(line) <= 80 for line in shown.splitlines() if not line.startswith("  -"))
    assert len(commands) > 15


def test_an_eof_error_of_our_own_is_not_an_interruption() -> None:
    @app.command("broken")
    def _broken() -> None:
        raise EOFError("marshal data too short")

    try:
        with pytest.raises(EOFError, match="marshal data too short"):
            run(["broken"])
    finally:
        app.registered_commands.pop()
