"""Makes a draft model for a target of the Llama kind out of text that the target wrote.

    spool generate TARGET --prompts PROMPTS.jsonl --output ANSWERS.jsonl --max-tokens 512
    python -m bench.make_draft TARGET_FOLDER --prompts PROMPTS.jsonl --answers ANSWERS.jsonl --output FOLDER

The draft has the target's embedding, head and first layers, which stay as they are, and a few trained layers and a norm
that start as copies of the target's last ones. They learn the target's distribution over the next token, and its final
hidden states. The most frequent tokens of the answers become the draft's vocabulary (FR-Spec, arXiv 2502.14856).

FOLDER then holds the draft as a Hugging Face model in `draft/`, and `trained_layers.safetensors` and
`draft_vocabulary.json`, the two files that engine/demo/assets/ has for the demo. The last line of standard
output is a JSON object with the share of held-out tokens that the draft proposes right.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (the name everybody knows)
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

from spool.deploy.errors import UsageError
from spool.deploy.offline.prompts import load_prompts
from spool.engine.demo.convert import TRAINED_LAYERS, assemble_draft
from spool.engine.models.draft_vocabulary import FIELD_NAME, FILE_NAME
from spool.engine.models.reference import transformers_model
from spool.services.text.tokenizer import ModelTokenizer

HELD_OUT = 10
"""One text in so many is not learnt from."""
_WARM_UP_STEPS = 40
_STEPS_BETWEEN_REPORTS = 20


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt and the target's answer. The answer begins at `start`."""

    tokens: Sequence[int]
    start: int


@dataclass(frozen=True, slots=True)
class Settings:
    """A step learns from about `tokens` tokens. The cross entropy covers the draft's vocabulary and `other_tokens`
    further tokens, which are drawn anew in each step. `hidden_weight` is the weight of the smooth L1 distance to the
    target's final hidden states."""

    minutes: float = 60.0
    steps: int | None = None
    tokens: int = 4096
    learning_rate: float = 1e-3
    other_tokens: int = 1024
    hidden_weight: float = 0.3
    seed: int = 0


class TrainedLayers(nn.Module):
    """What is trained, in float32. Reads the output of the target's layer `kept - 1`; the target's head reads it."""

    def __init__(self, target: PreTrainedModel, kept: int, trained: int) -> None:
        """Raises ValueError if the target has too few layers."""
        super().__init__()
        decoder = target.get_decoder()
        if not 0 <= kept <= len(decoder.layers) - trained or trained < 1:
            raise ValueError(f"kept and trained layers are {kept} and {trained}, the target has {len(decoder.layers)}")
        config = copy.deepcopy(target.config)
        config._attn_implementation = "sdpa"
        self._kept = kept
        self.layers = nn.ModuleList(LlamaDecoderLayer(config, index) for index in range(trained)).float()
        self.norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps).float()
        self._rotary = LlamaRotaryEmbedding(config)
        for layer, last in zip(self.layers, decoder.layers[-trained:], strict=True):
            layer.load_state_dict(last.state_dict())
        self.norm.load_state_dict(decoder.norm.state_dict())
        self.to(target.device)

    def forward(self, features: Tensor) -> Tensor:
        """Features [1, L, H] of positions 0 to L - 1 to final hidden states [L, H]."""
        positions = torch.arange(features.shape[1], device=features.device)[None]
        hidden, rotation = features, self._rotary(features, positions)
        for layer in self.layers:
            hidden = layer(hidden, position_embeddings=rotation, attention_mask=None)
        normed: Tensor = self.norm(hidden)
        return normed[0]

    def tensors(self) -> dict[str, Tensor]:
        """Under the names that they have in the draft, in bfloat16."""
        found = {f"model.norm.{name}": tensor for name, tensor in self.norm.state_dict().items()}
        for index, layer in enumerate(self.layers, self._kept):
            found |= {f"model.layers.{index}.{name}": tensor for name, tensor in layer.state_dict().items()}
        return {name: tensor.to("cpu", torch.bfloat16).contiguous() for name, tensor in found.items()}


class Trainer:
    """Trains layers on texts; `vocabulary` are the token ids that the draft may propose."""

    def __init__(self, target: PreTrainedModel, layers: TrainedLayers, kept: int, vocabulary: Sequence[int]) -> None:
        self.layers = layers
        self._target = target
        self._kept = kept
        self._head: Tensor = target.get_output_embeddings().weight.detach()
        self._vocabulary = torch.tensor(vocabulary, device=target.device)

    def train(self, texts: Sequence[Text], settings: Settings) -> None:
        """Until `settings.minutes` are over, or after `settings.steps`."""
        generator = torch.Generator().manual_seed(settings.seed)
        optimiser = torch.optim.AdamW(self.layers.parameters(), settings.learning_rate, betas=(0.9, 0.95))
        started, step, spent = time.monotonic(), 0, 0.0
        while spent < 1:
            for group in optimiser.param_groups:
                warm_up = min(1.0, (step + 1) / _WARM_UP_STEPS)
                group["lr"] = settings.learning_rate * warm_up * (0.03 + 0.97 * (1 + math.cos(math.pi * spent)) / 2)
            optimiser.zero_grad()
            loss = self._backward(_batch(texts, settings.tokens, generator), settings, generator)
            torch.nn.utils.clip_grad_norm_(self.layers.parameters(), 1.0)
            optimiser.step()
            step += 1
            minutes = (time.monotonic() - started) / 60
            spent = step / settings.steps if settings.steps is not None else minutes / settings.minutes
            if step % _STEPS_BETWEEN_REPORTS == 0:
                print(f"step {step}, {minutes:.1f} minutes, loss {loss:.3f}", file=sys.stderr, flush=True)

    @torch.no_grad()
    def agreement(self, texts: Sequence[Text]) -> float:
        """The share of answer tokens that the draft would have proposed, given the text before each."""
        right = total = 0
        for text in texts:
            features, _ = self._target_pass(text)
            hidden = self.layers(features)[text.start - 1 : -1]
            proposed = self._vocabulary[(hidden @ self._head[self._vocabulary].float().T).argmax(-1)]
            answer = torch.tensor(text.tokens[text.start :], device=proposed.device)
            right += int((proposed == answer).sum())
            total += len(answer)
        return right / total

    def _backward(self, texts: Sequence[Text], settings: Settings, generator: torch.Generator) -> float:
        """Adds up the gradients of some texts; returns the mean loss of a token."""
        others = torch.randint(len(self._head), (settings.other_tokens,), generator=generator).to(self._head.device)
        head = self._head[torch.cat((self._vocabulary, others[~torch.isin(others, self._vocabulary)]))].float()
        count = sum(len(text.tokens) - text.start for text in texts)
        summed = 0.0
        for text in texts:
            features, final = self._target_pass(text)
            hidden = self.layers(features)[text.start - 1 : -1]
            wanted = final[text.start - 1 : -1]
            target = (wanted @ head.T).softmax(-1)
            loss = F.cross_entropy(hidden @ head.T, target, reduction="sum") / count
            loss += settings.hidden_weight * F.smooth_l1_loss(hidden, wanted) * len(wanted) / count
            loss.backward()
            summed += loss.item()
        return summed

    @torch.no_grad()
    def _target_pass(self, text: Text) -> tuple[Tensor, Tensor]:
        """Features [1, L, H] and final hidden states [L, H], both float32."""
        ids = torch.tensor([text.tokens], device=self._target.device)
        states = self._target(input_ids=ids, output_hidden_states=True).hidden_states
        return states[self._kept].float(), states[-1][0].float()


def _batch(texts: Sequence[Text], tokens: int, generator: torch.Generator) -> list[Text]:
    batch: list[Text] = []
    while sum(len(text.tokens) for text in batch) < tokens:
        batch.append(texts[int(torch.randint(len(texts), (), generator=generator))])
    return batch


def read_texts(prompts: Path, answers: Path, tokenizer: ModelTokenizer) -> list[Text]:
    """Raises `UsageError` for bad prompts, ValueError for answers that `spool generate` did not write for them."""
    asked = load_prompts(prompts, None)
    texts = []
    for number, line in enumerate(answers.read_bytes().splitlines(), 1):
        try:
            content = json.loads(line)
            prompt = asked[content["index"]].encode(tokenizer)
            texts.append(Text([*prompt, *content["tokens"]], len(prompt)))
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise ValueError(f"{answers}:{number} is no answer of `spool generate` to these prompts") from error
    if len(texts) < HELD_OUT:
        raise ValueError(f"{answers} has {len(texts)} answers, must have at least {HELD_OUT}")
    return texts


def frequent_tokens(texts: Sequence[Text], size: int, always: set[int]) -> list[int]:
    """The `size` most frequent tokens of the answers, and `always`, ascending."""
    counts = Counter(token for text in texts for token in text.tokens[text.start :])
    ordered = sorted(counts, key=lambda token: (-counts[token], token))
    return sorted({*ordered[:size], *always})


def make_draft(
    folder: Path, texts: Sequence[Text], output: Path, kept: int, trained: int, vocabulary: int, settings: Settings
) -> dict[str, Any]:
    """Writes the draft of the target in `folder` to `output`; the answer holds the agreement before and after."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    target = transformers_model(folder, "auto").to(device).eval().requires_grad_(False)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    held_out = texts[::HELD_OUT]
    learnt = [text for place, text in enumerate(texts) if place % HELD_OUT]
    token_ids = frequent_tokens(learnt, vocabulary, {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder})
    trainer = Trainer(target, TrainedLayers(target, kept, trained), kept, token_ids)
    before = trainer.agreement(held_out)
    trainer.train(learnt, settings)
    output.mkdir(parents=True, exist_ok=True)
    save_file(trainer.layers.tensors(), output / TRAINED_LAYERS)
    (output / FILE_NAME).write_text(json.dumps({FIELD_NAME: token_ids}, separators=(",", ":")) + "\n")
    assemble_draft(folder, output / "draft", output)
    return {"held_out_texts": len(held_out), "before": before, "agreement": trainer.agreement(held_out)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path, help="a folder with a Llama model")
    parser.add_argument("--prompts", type=Path, required=True, help="JSON lines as for `spool generate`")
    parser.add_argument("--answers", type=Path, required=True, help="what `spool generate` wrote for them")
    parser.add_argument("--output", type=Path, required=True, help="a folder for the draft")
    parser.add_argument("--minutes", type=float, default=60.0, help="of training")
    parser.add_argument("--kept-layers", type=int, default=6, help="first layers of the target that the draft has")
    parser.add_argument("--trained-layers", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, default=8192, help="tokens that the draft may propose")
    asked = parser.parse_args()
    try:
        texts = read_texts(asked.prompts, asked.answers, ModelTokenizer(asked.target))
        settings = Settings(minutes=asked.minutes)
        layers = asked.kept_layers, asked.trained_layers
        found = make_draft(asked.target, texts, asked.output, *layers, asked.vocabulary, settings)
    except (UsageError, ValueError, OSError) as error:
        print(f"make_draft: {error}", file=sys.stderr)
        return 1
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
