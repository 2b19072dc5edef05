"""Parts of the command line that need no workers."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import StringIO
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import typer

from spool.deploy.cli.chat import chat
from spool.deploy.cli.command_options import SERVING, takes_options
from spool.deploy.config.loading import GivenValue, load_configuration
from spool.deploy.config.spool_config import SpoolConfig
from spool.deploy.errors import RunError, UsageError
from spool.deploy.offline.comparison import compare
from spool.deploy.offline.decoding import Completion, Job, longest_lengths, make_jobs
from spool.deploy.offline.prompts import Prompt, load_prompts
from spool.deploy.offline.results import settings_digest
from spool.deploy.offline.settings import SamplingSettings, configured
from spool.deploy.workers import worker_devices
from spool.engine.models.memory_plan import model_memory
from spool.engine.settings import BATCHED_TOKENS_ON_GPU
from spool.scheduler.config import SchedulerConfig
from spool.scheduler.sampling import SamplingParameters
from spool.services.gateway.settings import TlsFiles
from spool.services.text.tokenizer import ModelTokenizer
from tests.support.command_line import save_tokenizer, spool_here, write_lines
from tests.support.tiny_models import tiny_model


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ModelTokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder)
    return ModelTokenizer(folder)


def job(index: int = 0, prompt: tuple[int, ...] = (1, 2, 3), max_tokens: int = 8) -> Job:
    return Job(Prompt(index, f"p:{index}", "abc", ()), prompt, max_tokens, SamplingParameters())


# --- comparison -------------------------------------------------------------------------------------------------------


def test_logits_count_up_to_the_first_different_token(tokenizer: ModelTokenizer) -> None:
    expected = [Completion([5, 6, 7, 8], [1, 2, 3, 4])]
    found = [Completion([5, 6, 9, 8], [1, 20, 30, 4])]
    comparison = compare([job(4)], expected, found, tokenizer)
    assert comparison.exact_match == 0
    # After the third token the two continue different texts.
    assert (comparison.compared_logits, comparison.equal_logits) == (3, 1)
    assert comparison.first_unequal_logits == (4, 1)
    divergence = comparison.first_divergence
    assert divergence is not None
    assert (divergence.index, divergence.position) == (4, 2)
    assert (divergence.expected, divergence.found) == tuple(
        f"{tokenizer.decode([one])!r} (token {one})" for one in (7, 9)
    )
    assert divergence.context == tokenizer.decode([1, 2, 3, 5, 6])
    assert "prompt 4, output token 2, after" in str(divergence)


def test_an_output_that_ends_early_differs(tokenizer: ModelTokenizer) -> None:
    comparison = compare([job()], [Completion([5, 6])], [Completion([5])], tokenizer)
    assert comparison.exact_match == 0
    assert comparison.first_divergence is not None
    assert "found the end" in str(comparison.first_divergence)


# --- results ----------------------------------------------------------------------------------------------------------


def test_settings_digest_follows_what_changes_text(tmp_path: Path) -> None:
    def digest(*overrides: str, vocabulary: bytes = b"v", **sampling: int) -> str:
        return settings_digest(load_configuration(None, overrides), SamplingSettings(**sampling), vocabulary)

    for same in (
        "scheduling.policy=eqspec",
        "scheduling.batch_size=2",
        "models.draft=ngram",
        "groups.draft.replicas=2",
    ):
        assert digest(same) == digest()
    models = ("target=another", "exact=false", "quantization=int4", "kv_cache_dtype=int8")
    other = [digest(f"models.{change}") for change in models] + [digest(seed=1), digest(max_tokens=5)]
    template = tmp_path / "template.jinja"
    for text in ("a", "b"):
        template.write_text(text)
        other.append(digest(f"models.chat_template={template}"))
    assert len({digest(), digest(vocabulary=b"w"), *other}) == 10


# --- settings and jobs ------------------------------------------------------------------------------------------------


def test_options_have_vllms_names_too() -> None:
    found: list[SpoolConfig] = []

    @takes_options(SERVING)
    def serve(given: list[GivenValue]) -> int:
        found.append(load_configuration(None, given=given))
        return 0

    app = typer.Typer()
    app.command()(serve)
    words = "--max-num-seqs 7 --ssl-certfile cert.pem --ssl-keyfile key.pem --chat-template own.jinja ./model/"
    assert typer.main.get_command(app).main(words.split(), standalone_mode=False) == 0
    [config] = found
    assert config.auth.tls == TlsFiles(certificate=Path("cert.pem"), key=Path("key.pem"))
    assert (config.scheduling.max_running, config.models.chat_template) == (7, Path("own.jinja").absolute())
    assert config.served_name == "model"


@pytest.mark.parametrize(
    ("target", "name"),
    [("./model", "model"), ("./a//b/", "a/b"), ("../b", "../b"), ("/srv/b/", "/srv/b"), ("org/b", "org/b"), (".", ".")],
)
def test_a_models_name_is_the_plain_path(target: str, name: str) -> None:
    assert load_configuration(None, [f"models.target={target}"]).served_name == name
    assert load_configuration(None, [f"models.target={target}", "models.served_model_name=./m"]).served_name == "./m"


def test_seeds_count_up() -> None:
    sampling = SamplingSettings(seed=2**64 - 1, temperature=1.0)
    assert [sampling.parameters(index).seed for index in (0, 1, 2)] == [2**64 - 1, 0, 1]


def test_a_top_p_of_zero_is_greedy() -> None:
    assert SamplingSettings(top_p=0, temperature=0.8).parameters(0) == SamplingParameters(temperature=0)


def test_answers_get_shorter_where_the_model_ends(tokenizer: ModelTokenizer, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "prompts.jsonl", {"prompt": "a" * 10}, {"prompt": "a" * 95})
    jobs = make_jobs(load_prompts(path, None), tokenizer, SamplingSettings(max_tokens=20), 100)
    assert [(len(job.tokens), job.max_tokens) for job in jobs] == [(10, 20), (95, 5)]
    assert longest_lengths(jobs, SchedulerConfig(max_running=1, draft_length=3)) == [103]


def test_turns_and_messages_go_through_the_chat_template(tokenizer: ModelTokenizer, tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "prompts.jsonl", {"turns": ["hi", "ho"]}, {"messages": [{"role": "user", "content": "hi"}]}
    )
    texts = [tokenizer.decode(prompt.encode(tokenizer)) for prompt in load_prompts(path, None)]
    assert texts == ["user: hi\nassistant:"] * 2


def test_devices_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spool.deploy.workers.count_gpus", lambda device: 2)
    assert worker_devices("cuda", [1] * 3) == ["cuda:0", "cuda:1", "cuda:0"]
    assert worker_devices("auto", []) == []
    with pytest.raises(UsageError, match=r"tensor_parallel_size is 2, so that .* have 3 GPUs: this machine has 2"):
        worker_devices("auto", [2, 1])
    monkeypatch.setattr("spool.deploy.workers.count_gpus", lambda device: 0)
    with pytest.raises(UsageError, match="no GPU"):
        worker_devices("cuda", [1])


def test_runs_that_compare_compute_everything_anew() -> None:
    found = [configured([], compares).engine.prefix_cache for compares in (False, True)]
    assert found == [True, False]


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("quantization", "kv_cache_dtype", "mebibytes", "kv", "kv_bytes"),
    [("none", "auto", 16, "0.5 KiB", 512), ("int4", "int8", 10, "0.3 KiB", 288)],
)
def test_what_a_model_takes_is_said_before_it_is_started(
    quantization: str, kv_cache_dtype: str, mebibytes: int, kv: str, kv_bytes: int, tmp_path: Path
) -> None:
    """Nearly all are two tables of 65,536 x 64 numbers, of 2 bytes in bfloat16, of 1.25 in 8 bits with their scales; a
    token has two vectors of 32 numbers for each of 2 heads in 2 layers, in 8 bits each with 4 bytes of scale."""
    tiny_model("llama", vocab_size=2**16).save_pretrained(tmp_path)
    options = ("models", "fetch", tmp_path, "--dtype", "bfloat16", "--quantization", quantization)
    options += ("--kv-cache-dtype", kv_cache_dtype)
    on_cpu, on_gpu = spool_here(*options).err, spool_here(*options, "--gpu-memory", 4)
    said = f"quantization {quantization}, up to {mebibytes} MiB of weights, {kv} of KV for each token, so "
    said += f"{2**30 // kv_bytes:,}"
    assert said in on_cpu
    assert said in on_gpu.err
    memory = model_memory("target", tmp_path, "bfloat16", BATCHED_TOKENS_ON_GPU, 1, quantization)
    room = 4 * 2**30 * 0.9 - (mebibytes << 20) - memory.workspace
    tokens = re.search(r"a GPU of 4 GiB also has room for ([\d,]+) tokens of KV", on_gpu.err)
    assert tokens is not None
    assert int(tokens[1].replace(",", "")) * kv_bytes == pytest.approx(room, rel=1e-3)
    small = spool_here(*options, "--gpu-memory", 1)
    assert small.code == 1
    assert "the GPU is too small: it has 1.0 GiB" in small.err


# --- chat -------------------------------------------------------------------------------------------------------------


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def test_a_chat_survives_what_passes() -> None:
    """The server is full, then answers; refuses a history; breaks an answer off; then answers again."""
    full = (429, {"Retry-After": "0"}, b'{"error": {"message": "the queue is full"}}')
    long = (400, {}, b'{"error": {"message": "the prompt is too long"}}')
    broken = (200, {}, b'data: {"error": {"message": "no target is left"}}\n')
    answers = [full, full, answer("one"), long, (429, {"Retry-After": "3600"}, b"{}"), broken, answer("two")]
    with http_server(answers) as (url, asked):
        sink = StringIO()
        assert chat(url, "m", None, None, {}, Terminal("a\nb\nc\nd\ne\n"), sink) == 0
        said = sink.getvalue()
        assert said.count("the queue is full (HTTP 429); trying again in 0 s]") == 2
        assert "[the server refuses: the prompt is too long (HTTP 400); the question can be asked again]" in said
        assert "no target is left" in said
        assert [[one["content"] for one in body["messages"]] for body in asked] == [
            *[["a"]] * 3, ["a", "one", "b"], ["a", "one", "c"], ["a", "one", "d"], ["a", "one", "e"],
        ]  # fmt: skip
        answers[:] = [long]
        with pytest.raises(RunError, match="the prompt is too long"):
            chat(url, "m", None, None, {}, StringIO("a\nb\n"), StringIO())
    with pytest.raises(RunError, match="does not answer"):
        chat(url, "m", None, None, {}, StringIO("a\n"), StringIO())
    sink = StringIO()
    assert chat(url, "m", None, None, {}, Terminal("a\n"), sink) == 0
    assert "can be asked again" in sink.getvalue()


Answer = tuple[int, dict[str, str], bytes]


def answer(text: str) -> Answer:
    return 200, {}, f'data: {{"choices": [{{"delta": {{"content": "{text}"}}}}]}}\n\ndata: [DONE]\n'.encode()


@contextmanager
def http_server(answers: list[Answer]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Gives these answers in turn. Yields its address and the bodies that it was sent."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            status, headers, body = answers.pop(0)
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", asked
        finally:
            server.shutdown()
