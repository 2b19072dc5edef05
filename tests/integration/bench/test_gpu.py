"""`python -m bench.gpu` end to end with a tiny pair on a CPU, its equality figures against `model.generate`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from bench.gpu import measure
from bench.gpu.driver import RunRecord
from bench.gpu.figures import output_digest
from bench.gpu.measure_command import main
from bench.gpu.settings import GpuBenchSettings
from engine.errors import ExactModeUnavailableError
from engine.models.source import CACHE_VARIABLE, cache_folder
from engine.settings import EngineSettings

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
BATCH_SIZES = (1, 3)
COMPARED = 4
MAX_TOKENS = 20
PAIR = ("--shape", "tiny", "--dtype", "float32", "--device", "cpu")
MEASURED = (
    *(
        "--agreement",
        "0.7",
        "--batch-size",
        "1",
        "--batch-size",
        "3",
        "--compared",
        str(COMPARED),
        "--max-tokens",
        str(MAX_TOKENS),
    ),
    *("--prompt-tokens", "12", "--prefill-chunk", "16", "--logits-batch-size", "3", "--logits-tokens", "12"),
)
ALL = ("--one-in", "768", "--tests", "tests/unit/engine/test_pages.py", "--family", "qwen3")
# A machine for measuring has little more than torch and transformers.
ABSENT = ("ray", "grpc", "pydantic", "fastapi", "starlette", "uvicorn", "prometheus_client", "matplotlib", "scipy")


@dataclass
class Run:
    folder: Path
    result: dict[str, Any]
    told: str

    @property
    def pair(self) -> Path:
        return self.folder / "pair"


def run_without(absent: tuple[str, ...], arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Neither the process nor any that it starts can import these packages."""
    (folder / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({absent!r}))\n")
    environment = os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)  # the tests of kernels are interpreted
    command = [sys.executable, "-m", "bench.gpu", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("gpu")
    # The parts have a cache of their own there; kernels for the CPU are those that this test run has compiled.
    kernels = cache_folder() / "cpu-kernels"
    kernels.mkdir(mode=0o700, exist_ok=True)
    (folder / "cache").mkdir()
    (folder / "cache" / kernels.name).symlink_to(kernels)
    done = run_without(ABSENT, ["all", "--out", str(folder), *PAIR, *ALL, "--", *MEASURED], folder)
    assert done.returncode == 0, done.stderr + "".join(log.read_text() for log in folder.glob("*.log"))
    assert done.stdout == f"{folder / 'summary.json'}\n"
    told = (folder / "measure.log").read_text(encoding="utf-8")
    return Run(folder, json.loads((folder / "measure.json").read_text(encoding="utf-8")), told)


def kept(run: Run, part: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run.folder / f"{part}.json").read_text(encoding="utf-8"))
    return found


def test_all_parts_pass_on_a_stand_in(run: Run) -> None:
    """With Triton, whose kernels compile for GPUs on any machine."""
    found = kept(run, "summary")
    ended = {part["name"]: part["ended"] for part in found["parts"]}
    assert ended == dict.fromkeys(("compile", "tests", "exactness", "profile", "measure"), "passed")
    assert " passed in " in (run.folder / "tests.log").read_text(encoding="utf-8")
    compiled = kept(run, "compile")
    assert compiled["faults"] == 0
    assert compiled["builds"]
    cells = kept(run, "exactness")["cells"]
    assert [cell["dtype"] for cell in cells] == ["bfloat16", "float16", "float32"]
    assert all(cell["equal"] and len(cell["row_counts"]) > 1 for cell in cells)


def test_a_part_that_fails_costs_the_others_nothing(tmp_path: Path) -> None:
    done = run_without((), ["all", "--out", str(tmp_path), *PAIR, "--seconds", "0"], tmp_path)
    assert done.returncode == 1
    parts = json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))["parts"]
    assert [part["name"] for part in parts] == ["compile", "tests", "exactness", "profile", "measure"]
    assert {part["ended"] for part in parts} == {"out of time"}


@pytest.fixture(scope="module")
def generated(run: Run) -> list[list[int]]:
    """What transformers makes of the compared prompts, one at a time."""
    model = AutoModelForCausalLM.from_pretrained(run.pair / "target", dtype=torch.float32)
    settings = GpuBenchSettings("tiny", 0.7, BATCH_SIZES, "cpu", prompt_tokens=12)
    outputs = []
    for number in range(COMPARED):
        ids = torch.tensor([measure.prompt(settings, model.config.vocab_size, number)])
        with torch.no_grad():
            output = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=MAX_TOKENS, do_sample=False, pad_token_id=0
            )
        outputs.append(output[0, ids.shape[1] :].tolist())
    assert len({tuple(output) for output in outputs}) == COMPARED
    return outputs


def test_every_cell_is_there_once(run: Run) -> None:
    cells = [(cell["engine"]["exact"], cell["system"], cell["batch_size"]) for cell in run.result["cells"]]
    systems = ("plain", "auto", "ragged")
    assert sorted(cells) == sorted((e, s, b) for e in (True, False) for s in systems for b in BATCH_SIZES)
    assert run.result["complete"] is True
    assert run.result["left_out"] == {}


def test_equality_is_that_with_generate(run: Run, generated: list[list[int]]) -> None:
    digests = [output_digest(output) for output in generated]
    for cell in run.result["cells"]:
        assert cell["output_digests"] == digests
        assert (cell["equal_outputs"], cell["compared_outputs"]) == (COMPARED, COMPARED)


def test_exact_logits_are_bit_equal(run: Run) -> None:
    exact, free = run.result["logits"]
    assert exact["engine"] == {"exact": True}
    assert exact["compared_logits"] == exact["equal_logits"] == COMPARED * 12
    assert exact["equal_sequences"] == exact["sequences"] == COMPARED
    assert exact["first_unequal"] is None
    assert free["engine"] == {"exact": False}
    assert free["compared_logits"] == COMPARED * 12
    assert (exact["system"], exact["batch_size"], exact["window"], exact["draft_length"]) == ("ragged", 3, 12, 4)


def test_figures_agree_with_each_other(run: Run) -> None:
    limit = run.result["streaming_limit"]
    model = AutoModelForCausalLM.from_pretrained(run.pair / "target", dtype=torch.float32)
    embedding = model.get_input_embeddings().weight.numel()
    assert limit["weight_bytes"] == 4 * (sum(p.numel() for p in model.parameters()) - embedding)
    assert limit["step_seconds"] == pytest.approx(limit["weight_bytes"] / limit["bytes_per_second"])
    for cell in run.result["cells"]:
        sequences = max(COMPARED, 4 * cell["batch_size"])
        assert cell["tokens"] == sequences * MAX_TOKENS
        assert cell["tokens_per_second"] == pytest.approx(cell["tokens"] / cell["seconds"])
        assert cell["streaming_share"] == pytest.approx(limit["step_seconds"] / cell["target_step_seconds"])
        # The first token of each sequence comes out of its prefill.
        assert cell["rounds"] * cell["committed_per_round"] == pytest.approx(sequences * (MAX_TOKENS - 1))
        assert 0 < cell["decode_steps"] <= cell["target_steps"]
        assert 1 <= cell["rows_per_step"] <= cell["batch_size"]
        assert 0 < cell["target_share"] + cell["draft_share"] + cell["core_share"] <= 1
        if cell["system"] == "plain":
            assert cell["committed_per_round"] == 1
            assert cell["drafted"] == cell["draft_steps"] == cell["draft_length"] == 0
        if cell["system"] == "ragged":
            assert cell["committed_per_round"] > 1.5
            assert cell["rounds"] + cell["accepted"] == pytest.approx(cell["rounds"] * cell["committed_per_round"])
            assert 0 < cell["accepted"] < cell["drafted"]
            assert cell["draft_steps"] > 0


def test_it_is_said_what_was_measured_on_what(run: Run) -> None:
    result = run.result
    assert result["kind"] == "gpu"
    assert result["command"].startswith("python -m bench.gpu measure pair --shape tiny --dtype float32")
    assert result["command"].endswith("-o measure.json")
    assert result["machine"]["torch"] == torch.__version__
    assert {"processor", "cores", "memory_gib", "python", "transformers"} <= result["machine"].keys()
    assert result["settings"]["batch_sizes"] == list(BATCH_SIZES)
    assert abs(result["pair"]["found"]["agreement"] - 0.7) < 0.1
    exact, free = result["targets"]
    assert len(exact["exact_row_counts"]) > 0
    assert free["exact_row_counts"] == []
    assert f"exact, ragged, batch {BATCH_SIZES[-1]}: " in run.told


def test_a_missing_package_is_named_in_one_sentence(tmp_path: Path) -> None:
    done = run_without(("safetensors",), ["measure"], tmp_path)
    assert done.returncode == 1
    assert done.stderr == "bench.gpu needs the Python package safetensors, which is not installed here.\n"


@pytest.fixture(autouse=True)
def own_cache(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(run.folder / "cache"))


def again(run: Run, output: Path, *more: str) -> int:
    return main([str(run.pair), *PAIR, *MEASURED, *more, "-o", str(output)])


def test_what_was_measured_before_a_failure_is_kept(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decode, runs = measure.VariantBench._run, []

    def fails_at_third(self: measure.VariantBench, *point: Any, **more: Any) -> RunRecord:
        runs.append(point)
        if len(runs) == 3:
            raise RuntimeError("the device\nis gone")
        return decode(self, *point, **more)

    monkeypatch.setattr(measure.VariantBench, "_run", fails_at_third)
    with pytest.raises(RuntimeError, match="is gone"):
        again(run, tmp_path / "part.json")
    found = json.loads((tmp_path / "part.json").read_text(encoding="utf-8"))
    assert [cell["system"] for cell in found["cells"]] == ["plain", "auto"]
    assert found["complete"] is False
    assert found["left_out"] == {"the rest": "the device is gone"}


def test_without_exact_mode_the_rest_is_measured(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = measure.load_target_engine

    def load_inexact(settings: EngineSettings, progress: Any) -> Any:
        if settings.exact:
            raise ExactModeUnavailableError("no shapes agree")
        return load(settings, progress)

    monkeypatch.setattr(measure, "load_target_engine", load_inexact)
    assert again(run, tmp_path / "free.json") == 1
    found = json.loads((tmp_path / "free.json").read_text(encoding="utf-8"))
    assert found["left_out"] == {"exact": "no shapes agree"}
    assert found["complete"] is False
    assert [cell["engine"] for cell in found["cells"]] == [{"exact": False}] * 6


def test_sequences_that_are_too_long_are_refused(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert again(run, tmp_path / "long.json", "--prompt-tokens", "1010") == 1
    reason = "prompt_tokens and max_tokens make sequences of 1035, must be at most 1024"
    assert capsys.readouterr().err.endswith(f"bench.gpu: {reason}\n")
    found = json.loads((tmp_path / "long.json").read_text(encoding="utf-8"))
    assert found["left_out"] == {"the rest": reason}


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--seed", "5"), "holds a pair with seed 0, not 5"),
        (("--agreement", "0.8"), "holds a pair with agreement 0.7, not 0.8"),
        (("--shape", "round"), "shape is 'round', must be one of"),
    ],
)
def test_another_pair_is_not_taken_for_the_one_asked_for(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: tuple[str, ...], words: str
) -> None:
    assert again(run, tmp_path / "other.json", *more) == 1
    assert words in capsys.readouterr().err


def test_a_folder_with_something_else_is_left_alone(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / "precious").write_text("weights", encoding="utf-8")
    assert main([str(folder), *PAIR, *MEASURED, "-o", str(tmp_path / "out.json")]) == 1
    assert "holds no pair.json of a pair; choose another folder" in capsys.readouterr().err
    assert [file.name for file in folder.iterdir()] == ["precious"]
