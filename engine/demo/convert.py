"""The part of building the demo models that needs torch, the draft and the head, run as a program of its own.

    python -m spool.engine.demo.convert demo-draft|demo-head TARGET_FOLDER FOLDER

A process of its own keeps torch and the conversion's memory out of the caller, and the library's bars and warnings off
its terminal.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from spool.engine.models.reference import transformers_model
from spool.engine.models.source import DRAFT_VOCABULARY, TRAINED_HEAD, TRAINED_LAYERS, DemoPart, demo_assets

_FIELDS_OF_TARGET = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act",
    "rms_norm_eps", "max_position_embeddings", "vocab_size",
)  # fmt: skip
"""What a head's layer has in common with its target."""


def assemble_draft(target_folder: Path, folder: Path, assets: Traversable) -> None:
    """Writes the draft to `folder`: embedding, tied head and first layers of the target, then the trained layers.

    A draft vocabulary among the assets is copied: Spool then computes a smaller head, plain transformers the whole one.
    """
    import torch
    from safetensors.torch import load
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    trained = load((assets / TRAINED_LAYERS).read_bytes())
    target = expanded_model(target_folder, torch.bfloat16)
    config = AutoConfig.from_pretrained(target_folder, num_hidden_layers=_layers_up_to_the_last(trained))
    draft = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    kept = {name: tensor for name, tensor in target.state_dict().items() if name in draft.state_dict()}
    draft.load_state_dict(kept | trained)
    draft.generation_config = GenerationConfig.from_pretrained(target_folder)
    draft.save_pretrained(folder)
    AutoTokenizer.from_pretrained(target_folder).save_pretrained(folder)
    if (assets / DRAFT_VOCABULARY).is_file():
        (folder / DRAFT_VOCABULARY).write_bytes((assets / DRAFT_VOCABULARY).read_bytes())


def assemble_head(target_folder: Path, folder: Path, assets: Traversable) -> None:
    """Writes the head to `folder`, in the format that EAGLE-3 heads are published in: what was trained, and of the
    target's head the rows of the draft vocabulary."""
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    from spool.engine.models.draft_vocabulary import read_draft_vocabulary

    with resources.as_file(assets / TRAINED_HEAD) as path, safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (no mapping)
        layers = json.loads(file.metadata()["feature_layers"])
    target = expanded_model(target_folder, torch.bfloat16)
    with resources.as_file(assets) as here:
        vocabulary = read_draft_vocabulary(here, target.config.vocab_size)
    assert vocabulary is not None
    tensors["lm_head.weight"] = target.get_output_embeddings().weight.detach()[vocabulary].clone()
    tensors["d2t"] = vocabulary - torch.arange(len(vocabulary))
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    config, rope = target.config, dict(target.config.rope_parameters)
    fields = {name: getattr(config, name) for name in _FIELDS_OF_TARGET} | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": len(vocabulary),
        "eagle_aux_hidden_state_layer_ids": layers,
        # As configurations had it when this format was made.
        "rope_theta": rope.pop("rope_theta"),
    }
    if rope.get("rope_type", "default") != "default":
        fields["rope_scaling"] = rope
    (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def expanded_model(folder: Path, dtype: Any) -> Any:
    """The model in `folder` as transformers has it, its weights in `dtype`."""
    from transformers import AutoConfig

    from spool.engine.quantization.gguf_file import GgufFile
    from spool.engine.quantization.model import build_model, open_weights

    source = open_weights(folder)
    if not isinstance(source, GgufFile):
        return transformers_model(folder, dtype)
    # transformers reads such a file with a package that Spool does not need.
    model = build_model(source, AutoConfig.from_pretrained(folder), dtype, keep=False)
    model.set_attn_implementation("sdpa")
    return model


def _layers_up_to_the_last(names: Iterable[str]) -> int:
    return 1 + max(int(found[1]) for name in names if (found := re.match(r"model\.layers\.(\d+)\.", name)))


def main(arguments: list[str]) -> None:
    match arguments:
        case [DemoPart.DRAFT | DemoPart.HEAD as part, target_folder, folder]:
            assemble = assemble_draft if part == DemoPart.DRAFT else assemble_head
            assemble(Path(target_folder), Path(folder), demo_assets())
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
