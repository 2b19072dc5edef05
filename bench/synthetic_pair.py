"""Writes a target and a draft with random weights, of which the draft is right as often as asked.

    python -m bench.synthetic_pair smollm2-135m FOLDER --agreement 0.7
    spool bench offline --target FOLDER/target --draft FOLDER/draft

The target's next token depends on the last token alone (bench/gpu/pair.py); text is its bytes.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast

from bench.gpu.pair import SHAPES, Pair


def write_pair(folder: Path, shape: str, agreement: float, dtype: torch.dtype = torch.bfloat16) -> None:
    """Writes `folder`/target and `folder`/draft."""
    pair = Pair(SHAPES[shape](), torch.device("cpu"), dtype)
    pair.set_agreement(agreement)
    for name, model in (("target", pair.target), ("draft", pair.draft)):
        model.generation_config = GenerationConfig(eos_token_id=None)
        model.save_pretrained(folder / name)
        save_tokenizer(folder / name, model.config.vocab_size)


def save_tokenizer(folder: Path, vocabulary: int) -> None:
    """A token for each byte; higher token ids have names that no text is split into."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = {character: number for number, character in enumerate(alphabet)}
    tokens |= {f"<{number}>": number for number in range(len(alphabet), vocabulary)}
    backend = Tokenizer(models.BPE(tokens, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    template = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
    PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template).save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--agreement", type=float, default=0.7, help="share of the target's tokens, 0 to 1")
    asked = parser.parse_args()
    write_pair(asked.folder, asked.shape, asked.agreement)


if __name__ == "__main__":
    main()
