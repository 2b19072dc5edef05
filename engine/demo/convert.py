"""The part of building the demo models that needs torch, the draft, run as a program of its own.

    python -m spool.engine.demo.convert TARGET_FOLDER FOLDER

A process of its own keeps torch and the conversion's memory out of the caller, and the library's bars and warnings off
its terminal.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from importlib.resources.abc import Traversable
from pathlib import Path

from spool.engine.models.reference import transformers_model
from spool.engine.models.source import demo_assets

TRAINED_LAYERS = "trained_layers.safetensors"


def assemble_draft(target_folder: Path, folder: Path, assets: Traversable) -> None:
    """Writes the draft to `folder`: embedding, tied head and first layers of the target, then the trained layers.

    A draft vocabulary among the assets is copied: Spool then computes a smaller head, plain transformers the whole one.
    """
    import torch
    from safetensors.torch import load
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    from spool.engine.models.draft_vocabulary import FILE_NAME
    from spool.engine.quantization.gguf_file import GgufFile
    from spool.engine.quantization.model import build_model, open_weights

    trained = load((assets / TRAINED_LAYERS).read_bytes())
    source = open_weights(target_folder)
    if isinstance(source, GgufFile):
        # transformers reads such a file with a package that Spool does not need.
        target = build_model(source, AutoConfig.from_pretrained(target_folder), torch.bfloat16, keep=False)
    else:
        target = transformers_model(target_folder, torch.bfloat16)
    config = AutoConfig.from_pretrained(target_folder, num_hidden_layers=_layers_up_to_the_last(trained))
    draft = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    kept = {name: tensor for name, tensor in target.state_dict().items() if name in draft.state_dict()}
    draft.load_state_dict(kept | trained)
    draft.generation_config = GenerationConfig.from_pretrained(target_folder)
    draft.save_pretrained(folder)
    AutoTokenizer.from_pretrained(target_folder).save_pretrained(folder)
    if (assets / FILE_NAME).is_file():
        (folder / FILE_NAME).write_bytes((assets / FILE_NAME).read_bytes())


def _layers_up_to_the_last(names: Iterable[str]) -> int:
    return 1 + max(int(found[1]) for name in names if (found := re.match(r"model\.layers\.(\d+)\.", name)))


def main(arguments: list[str]) -> None:
    match arguments:
        case [target_folder, folder]:
            assemble_draft(Path(target_folder), Path(folder), demo_assets())
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
