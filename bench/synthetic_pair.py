"""Target and draft with random weights in the shape of real models, agreeing as often as is asked for.

Speed does not depend on what weights say, only on shapes and on how many draft tokens are accepted. So pairs too large
to download, or not released, can be measured all the same.

    python -m bench.synthetic_pair qwen3-8b FOLDER --agreement 0.7

How. Row perm(v) of the LM head is the embedding of token v, so that a model whose layers add nothing follows every v
by perm(v). Target and draft share perm and nothing else. What their layers add to the residual stream is noise to that:
the louder it is, the oftener it wins. Its loudness is one factor on everything that layers add. That of the target is
set so that it departs from perm now and then, by what stands before; that of the draft so that it proposes what the
target chooses as often as asked, on texts that the target wrote itself (teacher forcing).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    Glm4Config,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

CHAT_TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}assistant:"
_BYTES = 256
# Attention sharp enough that what stands before counts.
_ATTENTION_GAIN = 2.0
_LOGIT_DEVIATION = 2.0
_TEXTS = 24
_PROMPT_TOKENS = 24
_WRITTEN_TOKENS = 64
_BISECTIONS = 14
_LOUDNESS = (1e-3, 1e3)


@dataclass(frozen=True, slots=True)
class PairShape:
    """Configurations of the two; their vocabularies have one size."""

    target: PreTrainedConfig
    draft: PreTrainedConfig


@dataclass(frozen=True, slots=True)
class SyntheticPair:
    """What was written. `agreement` is the share of the target's tokens that the draft proposes, teacher-forced;
    `mean_accepted` how many of `draft_length` draft tokens are accepted in a round then.
    """

    target: str
    draft: str
    asked: float
    agreement: float
    mean_accepted: float
    draft_length: int
    departures: float
    """Share of positions at which the target departs from perm, on random text."""


def _config(kind: type[PreTrainedConfig], vocabulary: int, *sizes: int, **more: Any) -> PreTrainedConfig:
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    return kind(
        vocab_size=vocabulary,
        **dict(zip((*names, "head_dim"), sizes, strict=True)),
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        **more,
    )


SHAPES: dict[str, Callable[[], PairShape]] = {
    # Qwen/Qwen3-8B and Qwen/Qwen3-0.6B, the latter with a head of its own.
    "qwen3-8b": lambda: PairShape(
        _config(Qwen3Config, 151936, 4096, 12288, 36, 32, 8, 128, max_position_embeddings=40960),
        _config(Qwen3Config, 151936, 1024, 3072, 28, 16, 8, 128, max_position_embeddings=40960),
    ),
    # lmsys/vicuna-7b-v1.3 and double7/vicuna-68m.
    "vicuna-7b": lambda: PairShape(
        _config(LlamaConfig, 32000, 4096, 11008, 32, 32, 32, 128, max_position_embeddings=4096),
        _config(LlamaConfig, 32000, 768, 3072, 2, 12, 12, 64, max_position_embeddings=4096),
    ),
    # zai-org/GLM-4-9B-0414; the draft has the shape of Qwen3-0.6B and GLM's vocabulary.
    "glm4-9b": lambda: PairShape(
        _config(Glm4Config, 151552, 4096, 13696, 40, 32, 2, 128, max_position_embeddings=32768),
        _config(Qwen3Config, 151552, 1024, 3072, 28, 16, 8, 128, max_position_embeddings=32768),
    ),
    # HuggingFaceTB/SmolLM2-135M, and a tenth of its layers.
    "smollm2-135m": lambda: PairShape(
        _config(LlamaConfig, 49152, 576, 1536, 30, 9, 3, 64, max_position_embeddings=8192),
        _config(LlamaConfig, 49152, 576, 1536, 3, 9, 3, 64, max_position_embeddings=8192),
    ),
    "small": lambda: PairShape(
        _config(Qwen3Config, 8192, 512, 1536, 8, 8, 4, 64, max_position_embeddings=4096),
        _config(Qwen3Config, 8192, 256, 512, 2, 4, 2, 64, max_position_embeddings=4096),
    ),
    "tiny": lambda: PairShape(
        _config(Qwen3Config, 512, 96, 192, 2, 4, 2, 32, max_position_embeddings=1024),
        _config(Qwen3Config, 512, 64, 128, 1, 4, 2, 32, max_position_embeddings=1024),
    ),
}


def write_pair(
    folder: Path,
    shape: PairShape,
    agreement: float,
    *,
    seed: int = 0,
    device: str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    draft_length: int = 4,
) -> SyntheticPair:
    """Writes `folder`/target and `folder`/draft, each with the tokenizer.

    Raises ValueError naming field, value and limit, and RuntimeError where the agreement cannot be had.
    """
    if not 0.05 <= agreement <= 0.99:
        raise ValueError(f"agreement is {agreement}, must be between 0.05 and 0.99")
    if shape.target.vocab_size != shape.draft.vocab_size:
        raise ValueError(f"vocab_size of the draft is {shape.draft.vocab_size}, must be {shape.target.vocab_size}")
    if shape.target.vocab_size < _BYTES:
        raise ValueError(f"vocab_size is {shape.target.vocab_size}, must be at least {_BYTES}")
    target, draft = folder / "target", folder / "draft"
    generator = torch.Generator().manual_seed(seed)
    successor = torch.randperm(shape.target.vocab_size, generator=generator)
    prompts = torch.randint(shape.target.vocab_size, (_TEXTS, _PROMPT_TOKENS), generator=generator)

    write_model(target, shape.target, successor, seed + 1, dtype)
    with _loaded(target, dtype, device) as model:
        # Less than the half of what the two may disagree, so that the draft's noise can make up the rest.
        wanted = (1 - agreement) / 4
        texts = torch.randint(shape.target.vocab_size, (_TEXTS, _PROMPT_TOKENS + _WRITTEN_TOKENS), generator=generator)
        loudness = bisect(lambda value: departures(model, value, texts, successor) - wanted)
        departed = departures(model, loudness, texts, successor)
    write_model(target, shape.target, successor, seed + 1, dtype, loudness)
    with _loaded(target, dtype, device) as model:
        written = write_texts(model, prompts)

    write_model(draft, shape.draft, successor, seed + 2, dtype)
    with _loaded(draft, dtype, device) as model:
        loudness = bisect(lambda value: agreement - agreements(model, value, written).mean().item())
    write_model(draft, shape.draft, successor, seed + 2, dtype, loudness)
    with _loaded(draft, dtype, device) as model:
        agreed = agreements(model, 1.0, written)
    reached = agreed.mean().item()
    if abs(reached - agreement) > 0.1:
        raise RuntimeError(f"agreement reached is {reached:.3f}, asked for {agreement}: try another seed")
    for one in (target, draft):
        save_tokenizer(one, shape.target.vocab_size)
    return SyntheticPair(
        str(target), str(draft), agreement, reached, mean_accepted(agreed, draft_length), draft_length, departed
    )


def write_model(
    folder: Path,
    config: PreTrainedConfig,
    successor: torch.Tensor,
    seed: int,
    dtype: torch.dtype,
    loudness: float = 1.0,
) -> None:
    """Random weights as safetensors, a file for each layer, so that no more than one is in memory at a time.

    The same seed gives the same weights but for their loudness.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config.dtype = dtype
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    parameters = dict(model.named_parameters())
    config.architectures = [type(model).__name__]
    generator = torch.Generator().manual_seed(seed)
    embedding = torch.empty(config.vocab_size, config.hidden_size, dtype=dtype).normal_(generator=generator)
    head = torch.empty_like(embedding)
    head[successor] = embedding * (_LOGIT_DEVIATION / math.sqrt(config.hidden_size))
    branches = branch_ends(parameters)
    files: dict[str, dict[str, torch.Size]] = {}
    for name, parameter in parameters.items():
        files.setdefault(_file_of(name), {})[name] = parameter.shape
    places: dict[str, str] = {}
    for number, shapes in enumerate(files.values(), 1):
        file = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        tensors = {}
        for name, shape in shapes.items():
            if name.endswith("embed_tokens.weight"):
                tensors[name] = embedding
            elif name.endswith("lm_head.weight"):
                tensors[name] = head
            else:
                factor = loudness if name in branches else 1.0
                tensors[name] = random_tensor(name, shape, dtype, generator, factor)
        save_file(tensors, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(shapes, file)
    index = {"metadata": {"part_of": "synthetic"}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    config.save_pretrained(folder)


def random_tensor(
    name: str, shape: torch.Size, dtype: torch.dtype, generator: torch.Generator, factor: float
) -> torch.Tensor:
    """Keeps the size of what comes in, times `factor`; sharper for queries and keys."""
    gain = _ATTENTION_GAIN if any(part in name for part in ("q_proj", "k_proj", "q_norm", "k_norm")) else 1.0
    if name.endswith(".bias"):
        return torch.zeros(shape, dtype=dtype)
    if len(shape) == 1:
        return torch.full(shape, gain * factor, dtype=dtype)
    return torch.empty(shape, dtype=dtype).normal_(0, gain * factor / math.sqrt(shape[-1]), generator=generator)


def branch_ends(parameters: dict[str, Any]) -> set[str]:
    """The last weights on the way of what a layer adds to the residual stream: norms where there are any (GLM-4)."""
    for endings in (
        ("post_self_attn_layernorm.weight", "post_mlp_layernorm.weight"),
        ("self_attn.o_proj.weight", "mlp.down_proj.weight"),
    ):
        found = {name for name in parameters if name.endswith(endings)}
        if found:
            return found
    raise ValueError("the architecture has layers of another kind")


def departures(model: Any, loudness: float, texts: torch.Tensor, successor: torch.Tensor) -> float:
    """Share of positions in the texts, [texts, tokens], where the model's choice is not the successor of the token."""
    return (choices(model, loudness, texts) != successor[texts]).float().mean().item()


def agreements(model: Any, loudness: float, written: torch.Tensor) -> torch.Tensor:
    """For each token that was written, [texts, written tokens], 1 where the model would have chosen it too."""
    found = choices(model, loudness, written)[:, _PROMPT_TOKENS - 1 : -1]
    return (found == written[:, _PROMPT_TOKENS:]).float()


@torch.inference_mode()
def choices(model: Any, loudness: float, texts: torch.Tensor) -> torch.Tensor:
    """The likeliest token after each position, [texts, tokens], with everything that layers add times `loudness`."""
    ends = {name.removesuffix(".weight") for name in branch_ends(dict(model.named_parameters()))}
    hooks = [
        module.register_forward_hook(lambda _module, _inputs, output: output * loudness)
        for name, module in model.named_modules()
        if name in ends
    ]
    try:
        # One text at a time: logits of all at once would be gigabytes.
        return torch.cat([model(text[None].to(model.device)).logits.argmax(-1).cpu() for text in texts])
    finally:
        for hook in hooks:
            hook.remove()


def write_texts(model: Any, prompts: torch.Tensor) -> torch.Tensor:
    """The prompts, [texts, tokens], each with what the model continues it by."""
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=None, pad_token_id=0)
    inputs = prompts.to(model.device)
    written = model.generate(inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=_WRITTEN_TOKENS)
    return written.cpu()


def bisect(excess: Callable[[float], float]) -> float:
    """The loudness at which a function that grows with it is about 0."""
    low, high = map(math.log, _LOUDNESS)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if excess(math.exp(middle)) > 0 else (middle, high)
    return math.exp((low + high) / 2)


def mean_accepted(agreed: torch.Tensor, draft_length: int) -> float:
    """Accepted draft tokens a round where rounds follow each other through texts of agreements, [texts, tokens]."""
    rounds = accepted = 0
    for text in agreed.bool().tolist():
        place = 0
        while place + draft_length < len(text):
            run = next((n for n in range(draft_length) if not text[place + n]), draft_length)
            rounds, accepted, place = rounds + 1, accepted + run, place + run + 1
    return accepted / rounds if rounds else 0.0


def save_tokenizer(folder: Path, vocabulary: int) -> None:
    """Text is its bytes; token ids above them have names that no text is split into."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = {character: number for number, character in enumerate(alphabet)}
    tokens |= {f"<{number}>": number for number in range(len(alphabet), vocabulary)}
    backend = Tokenizer(models.BPE(tokens, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=CHAT_TEMPLATE).save_pretrained(folder)


@contextmanager
def _loaded(folder: Path, dtype: torch.dtype, device: str) -> Iterator[Any]:
    yield AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, device_map=device).eval()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()


def _file_of(name: str) -> str:
    """Layers have a file each, embedding and head too, the rest is small."""
    parts = name.split(".")
    return ".".join(parts[: parts.index("layers") + 2]) if "layers" in parts else name


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--agreement", type=float, default=0.7)
    parser.add_argument("--draft-length", type=int, default=4, help="for the mean accepted length that is reported")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", help="where agreement is measured, as cuda:0")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    asked = parser.parse_args()
    try:
        pair = write_pair(
            asked.folder,
            SHAPES[asked.shape](),
            asked.agreement,
            seed=asked.seed,
            device=asked.device,
            dtype=getattr(torch, asked.dtype),
            draft_length=asked.draft_length,
        )
    except (ValueError, RuntimeError) as error:
        print(f"synthetic_pair: {error}", file=sys.stderr)
        return 1
    print(json.dumps({"shape": asked.shape, "seed": asked.seed} | asdict(pair)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
