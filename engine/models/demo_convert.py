"""The part of building the demo models that needs torch, run as a program of its own.

    python -m engine.models.demo_convert target GGUF FOLDER
    python -m engine.models.demo_convert draft TARGET_FOLDER FOLDER

A process of its own keeps torch and the conversion's memory out of the caller, and the library's bars and warnings off
its terminal.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from engine.models.source import demo_assets

TRAINED_LAYERS = "trained_layers.safetensors"

_END_OF_TEXT, _IM_START, _IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"


def convert_target(gguf: Path, folder: Path) -> None:
    """Writes the model in the GGUF file to `folder` as safetensors, with tokenizer and generation settings."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # The file's weights have four bits, so bfloat16 keeps all that is in them.
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    _set_token_ids(model, tokenizer)
    model.config.rms_norm_eps = 1e-5
    for unwanted in ("quantization_config", "_name_or_path", "_model_name_or_path", "unk_token_id"):
        if hasattr(model.config, unwanted):
            delattr(model.config, unwanted)
    # Without this the model takes itself for a quantized one when it is saved.
    model.hf_quantizer = None
    model.is_quantized = False
    model.save_pretrained(folder)
    _whole_tokenizer(tokenizer, model.config.max_position_embeddings).save_pretrained(folder)


def assemble_draft(target_folder: Path, folder: Path, assets: Traversable) -> None:
    """Writes the draft to `folder`: embedding, tied head and first layers of the target, then the trained layers.

    A draft vocabulary among the assets is copied: Spool then computes a smaller head, plain transformers the whole one.
    """
    import torch
    from safetensors.torch import load
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    from engine.models.draft_vocabulary import FILE_NAME

    trained = load((assets / TRAINED_LAYERS).read_bytes())
    target = AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.bfloat16)
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


def _set_token_ids(model: Any, tokenizer: Any) -> None:
    start, end, text_end = tokenizer.convert_tokens_to_ids([_IM_START, _IM_END, _END_OF_TEXT])
    for settings in (model.config, model.generation_config):
        settings.bos_token_id = start
        settings.eos_token_id = end
        settings.pad_token_id = end
    model.generation_config.eos_token_id = [end, text_end]


def _whole_tokenizer(converted: Any, max_length: int) -> Any:
    """Puts right what a GGUF file cannot say and the conversion guesses: digits stand alone, `<|im_end|>` ends a turn.

    The decoder loses the SentencePiece steps, which would turn the character U+2581 into a space.
    """
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    description = json.loads(converted.backend_tokenizer.to_str())
    description["model"].update(byte_fallback=False, fuse_unk=False)
    description.update(normalizer=None, post_processor=None)
    backend = Tokenizer.from_str(json.dumps(description))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=_IM_START,
        eos_token=_IM_END,
        pad_token=_IM_END,
        unk_token=_END_OF_TEXT,
        chat_template=converted.chat_template,
        clean_up_tokenization_spaces=False,
        model_max_length=max_length,
    )


def main(arguments: list[str]) -> None:
    match arguments:
        case ["target", gguf, folder]:
            convert_target(Path(gguf), Path(folder))
        case ["draft", target_folder, folder]:
            assemble_draft(Path(target_folder), Path(folder), demo_assets())
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
