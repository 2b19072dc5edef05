"""Folders whose files do not give a whole model are refused on every way of loading, naming the file or tensor."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from dataclasses import replace as replace_fields
from itertools import cycle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models

from spool.engine.errors import EngineError, UnsupportedModelError
from spool.engine.models.loading import load_draft_engine, load_target_engine
from spool.engine.models.weights import stored_tensors
from spool.engine.parallel.ranks import join_ranks
from spool.engine.settings import EngineSettings
from tests.support.command_line import save_tokenizer, spool, write_lines
from tests.support.ranks import target_of_ranks
from tests.support.tiny_models import tiny_model

Damage = Callable[[Path], object]


def remove(name: str) -> Damage:
    return lambda folder: _edit(folder, name, lambda tensors: tensors.pop(name))


def add(name: str, tensor: torch.Tensor, beside: str | None = None) -> Damage:
    """To the file that holds `beside`, the matrix unless it says otherwise."""
    return lambda folder: _edit(folder, beside or MATRIX, lambda tensors: tensors.update({name: tensor}))


def both(*damages: Damage) -> Damage:
    return lambda folder: [damage(folder) for damage in damages]


def replace(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Damage:
    return lambda folder: _edit(folder, name, lambda tensors: tensors.update({name: change(tensors[name])}))


def rename_all(folder: Path) -> None:
    for file in folder.glob("*.safetensors"):
        save_file({f"wrapped.{name}": tensor for name, tensor in load_file(file).items()}, file, {"format": "pt"})


def configure(**fields: object) -> Damage:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        merged = json.loads(path.read_text()) | fields
        path.write_text(json.dumps({name: value for name, value in merged.items() if value is not None}))

    return change


def _edit(folder: Path, name: str, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    file = folder / _index(folder)[name]
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})


def _index(folder: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    return found


def _shard(folder: Path) -> Path:
    return sorted(folder.glob("*.safetensors"))[1]


def _not_a_number(weights: torch.Tensor) -> torch.Tensor:
    weights[0] = torch.nan
    return weights


def _write(name: str, text: str) -> Damage:
    return lambda folder: (folder / name).write_text(text)


def _point_elsewhere(folder: Path) -> None:
    content = {"weight_map": _index(folder) | {MATRIX: "model-00009.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))


def _of_another_model(folder: Path) -> None:
    """A tokenizer with more tokens than the model has rows."""
    Tokenizer(models.WordLevel({str(number): number for number in range(200)}, "0")).save(f"{folder}/tokenizer.json")


def to_float8(weights: torch.Tensor) -> torch.Tensor:
    return weights.to(torch.float8_e4m3fn)


def _scaled(folder: Path) -> None:
    both(replace(MATRIX, to_float8), add(f"{MATRIX}_scale", torch.ones(1)))(folder)


ALGORITHM = '{"quantization": {"quant_algo": "%s"}}'
LAYER = "model.layers.1"
MATRIX = f"{LAYER}.self_attn.q_proj.weight"
ONES = torch.ones(4)
SHAPES = {
    "model.embed_tokens.weight": [96, 64],
    f"{LAYER}.input_layernorm.weight": [64],
    MATRIX: [128, 64],
    f"{LAYER}.mlp.down_proj.weight": [64, 96],
    "model.norm.weight": [64],
    "lm_head.weight": [96, 64],
}
DAMAGES: dict[str, tuple[Damage, str]] = {
    **{f"without {name}": (remove(name), f"holds no {name}") for name in SHAPES},
    **{
        f"fewer rows in {name}": (
            replace(name, lambda weights: weights[:-1].clone()),
            rf"{name} has the shape \[{rows - 1}\D.*, must have {re.escape(str([rows, *columns]))}",
        )
        for name, (rows, *columns) in SHAPES.items()
    },
    "renamed": (rename_all, "holds no lm_head.weight, .* and [0-9]+ more; it holds wrapped"),
    "one dimension": (replace(MATRIX, torch.flatten), rf"{MATRIX} has the shape \[8192\], must have \[128, 64\]"),
    "integers": (replace(MATRIX, lambda weights: weights.to(torch.int32)), f"{MATRIX} is of dtype I32"),
    "not a number": (replace(MATRIX, _not_a_number), f"{MATRIX} holds a value that is not a finite number"),
    "infinite": (replace("model.norm.weight", lambda weights: weights * torch.inf), "model.norm.weight holds a value"),
    "a bias that config.json lacks": (
        add(f"{LAYER}.self_attn.q_proj.bias", ONES),
        rf"holds {LAYER}\.self_attn\.q_proj\.bias",
    ),
    "a bias of a norm": (
        add("model.norm.bias", ONES),
        r"holds model\.norm\.bias, which its configuration has no place",
    ),
    "norms of heads": (add(f"{LAYER}.self_attn.q_norm.weight", ONES), rf"holds {LAYER}\.self_attn\.q_norm\.weight"),
    "fewer layers": (configure(num_hidden_layers=1), r"holds model\.layers\.1\.\S+, .* and [0-9]+ more, which"),
    "one more layer": (add("model.layers.2.input_layernorm.weight", ONES), r"holds model\.layers\.2\.input_layernorm"),
    "experts": (add(f"{LAYER}.mlp.experts.0.up_proj.weight", ONES), r"holds \S+\.mlp\.experts\.0\.up_proj\.weight"),
    "an adapter": (add(f"{LAYER}.self_attn.q_proj.lora_A.weight", ONES), r"holds \S+\.lora_A\.weight"),
    "a second head": (
        add("model.lm_head.weight", ONES),
        r"holds model\.lm_head\.weight and lm_head\.weight, which are",
    ),
    "a scale without codes": (add(f"{MATRIX}_scale", ONES), rf"holds {MATRIX}_scale, which its configuration has no"),
    "zero points without codes": (add(f"{LAYER}.mlp.qzeros", ONES.int()), rf"holds {LAYER}\.mlp\.qzeros"),
    "in two files": (
        add(MATRIX, ONES, beside="lm_head.weight"),
        rf"model-\S+ and model-\S+ both hold {MATRIX}",
    ),
    "FP8": (replace(MATRIX, to_float8), f"{MATRIX} is of dtype F8_E4M3, must be one of .* says how its numbers are"),
    "FP8 with scales, unsaid": (_scaled, f"{MATRIX} is of dtype F8_E4M3"),
    "an adapter's file": (
        lambda folder: save_file({"x": ONES}, folder / "adapter_model.safetensors"),
        r"holds adapter_model\.safetensors, which is not applied",
    ),
    "FP8 without its scale": (
        both(replace(MATRIX, to_float8), _write("hf_quant_config.json", ALGORITHM % "FP8")),
        f"holds no {MATRIX}_scale",
    ),
    "FP4 of ModelOpt": (
        both(_scaled, _write("hf_quant_config.json", ALGORITHM % "NVFP4")),
        "quantised by modelopt to NVFP4, which are not supported",
    ),
    "a broken quantization": (
        both(_scaled, _write("hf_quant_config.json", "[]")),
        r"hf_quant_config\.json cannot be read",
    ),
    "an older quantization of another form": (
        configure(compression_config={"format": "marlin-24", "config_groups": {}}),
        "quantised by compressed-tensors in format marlin-24, must be",
    ),
    "short shard": (
        lambda folder: _shard(folder).write_bytes(_shard(folder).read_bytes()[:-9]),
        "model-00002.* cannot",
    ),
    "empty shard": (lambda folder: _shard(folder).write_bytes(b""), r"model-00002\S* cannot be read"),
    "no shard": (
        lambda folder: _shard(folder).unlink(),
        r"index.json names model-00002\S*, which is not in the folder",
    ),
    "no index": (lambda folder: (folder / "model.safetensors.index.json").unlink(), "holds neither model.safetensors"),
    "broken index": (_write("model.safetensors.index.json", "["), "index.json cannot be"),
    "index of another file": (_point_elsewhere, "index.json names model-00009.safetensors, which is not in the folder"),
    "broken config": (_write("config.json", "{"), "config.* not a valid JSON file"),
    "no type": (configure(model_type=None, architectures=None), "should have a `model_type`"),
    "unknown type": (configure(model_type="nobodys"), "transformers cannot load"),
    "wrong field": (configure(hidden_size="wide"), "'hidden_size' expected int"),
    "attentions as output": (configure(output_attentions=True), "llama has output_attentions, which"),
    "a model for text inside": (configure(text_config={"vocab_size": 96}), "llama has a text_config, must have none"),
    "no numbers of heads": (configure(head_dim=0), "llama has head_dim 0, must be at least 1"),
    "no heads of keys": (configure(num_key_value_heads=0), "llama has num_key_value_heads 0, must be at least 1"),
    "three heads": (configure(num_attention_heads=3), "multiple of the number of attention heads"),
    "an unknown activation": (configure(hidden_act="nope"), "llama has hidden_act 'nope', which transformers does not"),
    "an unknown dtype": (configure(dtype="float99"), "transformers cannot load .*float99"),
    "padding without a row": (configure(pad_token_id=9999), "transformers cannot load .*padding_idx must be within"),
    "a quantization of another form": (configure(quantization_config=[1]), "transformers cannot load .*'list'"),
    "groups of another form": (
        configure(quantization_config={"quant_method": "gptq", "config_groups": [1]}),
        r"llama has config_groups \[1\], must be an object",
    ),
    "no vocab_size": (configure(vocab_size=None), r"weight has the shape \[96, 64\], must have \[32000, 64"),
    "more layers": (configure(num_hidden_layers=3), r"holds no model\.layers\.2"),
    "tokenizer of another model": (_of_another_model, r"tokenizer\.json has 200 tokens, must have at most 96"),
    "broken tokenizer": (_write("tokenizer.json", '{"model": '), r"tokenizer\.json cannot be read"),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "model"
    tiny_model("llama").save_pretrained(folder, max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


def load_target(folder: Path) -> None:
    load_target_engine(EngineSettings(str(folder), kv_pages=8, exact=False), lambda *_: None)


def load_draft(folder: Path) -> None:
    load_draft_engine(EngineSettings(str(folder), kv_pages=8), lambda *_: None)


def load_rank(folder: Path) -> None:
    settings = EngineSettings(str(folder), kv_pages=8, exact=False, tensor_parallel_size=2)
    meeting = folder.parent / "meeting"
    meeting.mkdir()
    with ThreadPoolExecutor() as other:
        joined = []

        def start() -> tuple[Path, Callable[[str], None]]:
            joined.append(other.submit(join_ranks, meeting, 1, 2, torch.device("cpu")))
            return meeting, pytest.fail

        load_target_engine(settings, lambda *_: None, start)


# Each by the target's way of loading and, in turn, by one of the others.
@pytest.mark.parametrize(
    ("damage", "load"),
    [*((damage, load_target) for damage in DAMAGES), *zip(DAMAGES, cycle([load_draft, load_rank]), strict=False)],
)
def test_a_damaged_folder_is_refused(damage: str, load: Callable[[Path], None], whole: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / "damaged"))
    make, message = DAMAGES[damage]
    make(folder)
    with pytest.raises(EngineError, match=f"(?i){message}") as refused:
        load(folder)
    assert "\n" not in str(refused.value)


HARMLESS = {
    "model.layers.0.self_attn.rotary_emb.inv_freq": ONES,
    "model.layers.0.attn.masked_bias": ONES,
    "model.embeddings.position_ids": ONES.long(),
    "model.layers.2.eh_proj.weight": ONES,
    "model.layers.2.mlp.up_proj.weight": ONES,
    "mtp.fc.weight": ONES,
    "model.layers.0.self_attn.k_proj.k_scale": ONES,
    "model.layers.0.self_attn.v_scale": ONES.to(torch.float8_e4m3fn),
    "vision_tower.patches.weight": ONES,
    "model.visual.patches.weight": ONES,
    "v_head.summary.weight": ONES,
}


@pytest.mark.parametrize("load", [load_target, load_draft, load_rank])
def test_what_published_models_hold_beside_the_text_is_left_out(
    load: Callable[[Path], None], whole: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / "published"))
    both(*(add(name, tensor) for name, tensor in HARMLESS.items()))(folder)
    if load is load_rank:
        with target_of_ranks(EngineSettings(str(folder), kv_pages=8, exact=False, tensor_parallel_size=2)):
            return
    load(folder)


def test_a_head_beside_tied_embeddings_may_be_theirs_once_more(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.get_output_embeddings().weight = model.get_input_embeddings().weight
    model.save_pretrained(tmp_path)
    configure(tie_word_embeddings=True)(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"].clone()
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    load_target(tmp_path)


def test_the_settings_say_what_else_may_be_left_out(whole: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / "model"))
    both(add("extra.weight", ONES), add("other.0.weight", ONES), add("other.1.table", ONES.int()))(folder)
    settings = EngineSettings(str(folder), kv_pages=8, exact=False)
    with pytest.raises(UnsupportedModelError, match=r"holds extra\.weight, which"):
        load_target_engine(replace_fields(settings, ignore_tensors=("other.*",)), lambda *_: None)
    headless = Path(shutil.copytree(folder, tmp_path / "headless"))
    remove("lm_head.weight")(headless)
    with pytest.raises(UnsupportedModelError, match=r"holds no lm_head\.weight"):
        load_target_engine(replace_fields(settings, model=str(headless), ignore_tensors=("*",)), lambda *_: None)
    ignoring = EngineSettings.from_plain(asdict(replace_fields(settings, ignore_tensors=["extra.weight", "other.*"])))
    load_target_engine(ignoring, lambda *_: None)


def test_experts_in_float8_without_scales_are_refused(tmp_path: Path) -> None:
    tiny_model("qwen3_moe").save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.experts.3.down_proj.weight"
    save_file(stored | {name: to_float8(stored[name])}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedModelError, match=f"{name} is of dtype F8_E4M3"):
        load_target(tmp_path)


@pytest.mark.parametrize("family", ["glm4_moe", "minimax_m2"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_biases_of_experts_are_finite(family: str, value: float, tmp_path: Path) -> None:
    more = {"first_k_dense_replace": 0} if family == "glm4_moe" else {}
    tiny_model(family, **more).save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    name = next(name for name in stored if name.endswith("e_score_correction_bias"))
    stored[name][0] = value
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedModelError, match="e_score_correction_bias holds a value that is not a finite"):
        load_target(tmp_path)


def test_pickled_weights_are_numbers_with_a_place(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.config.save_pretrained(tmp_path)
    stored = model.state_dict()
    for changed, said in (
        ({MATRIX: to_float8(stored[MATRIX])}, f"{MATRIX} is of dtype float8_e4m3fn"),
        ({MATRIX: stored[MATRIX].int()}, f"{MATRIX} is of dtype int32"),
        ({f"{LAYER}.mlp.up_proj.bias": ONES}, rf"holds {LAYER}\.mlp\.up_proj\.bias"),
    ):
        torch.save(stored | changed, tmp_path / "pytorch_model.bin")
        with pytest.raises(UnsupportedModelError, match=said):
            load_target(tmp_path)


def test_pickled_weights_that_are_cut_are_refused(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    load_target(tmp_path)
    file = tmp_path / "pytorch_model.bin"
    file.write_bytes(file.read_bytes()[:-2000])
    with pytest.raises(UnsupportedModelError, match=f"cannot load {tmp_path.name}"):
        load_target(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_command_line_names_the_tensor_that_is_missing(ranks: int, whole: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / "damaged"))
    remove("lm_head.weight")(folder)
    save_tokenizer(folder)
    prompts = write_lines(tmp_path / "prompts.jsonl", {"prompt": "hello"})
    ended = spool("generate", folder, "--prompts", prompts, "--tensor-parallel-size", ranks)
    assert ended.code == 1
    assert "damaged holds no lm_head.weight" in ended.err


def test_a_file_that_may_not_be_read_is_not_said_to_be_missing() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder, file = Path(name), Path(name) / "model.safetensors"
        save_file({"weight": torch.zeros(1)}, file)
        file.chmod(0)
        folder.chmod(0o755)
        user = os.geteuid()
        if user == 0:
            os.seteuid(65534)  # nobody: root may read everything
        try:
            with pytest.raises(UnsupportedModelError, match=r"model\.safetensors cannot be read: .*Permission denied"):
                stored_tensors([file])
        finally:
            os.seteuid(user)
