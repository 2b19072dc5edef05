"""What becomes of a family: a tiny model of it, served, beside the same model by `model.generate`."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import PreTrainedModel

from bench.families.decoding import decode
from bench.families.tiny import VOCABULARY, tiny_config, tiny_model
from engine.errors import EngineError, ExactModeUnavailableError, one_line
from engine.models.loading import load_target_engine
from engine.settings import EngineSettings
from engine.target import TargetEngine

_SECONDS = 300
_NEW_TOKENS = 12
_PROMPTS = [[(7 * place + number) % VOCABULARY for place in range(length)] for number, length in enumerate((2, 6, 11))]
_WRONG_DRAFTS = (3, 5)


class Verdict(Enum):
    EXACT = "exact"
    """The output is that of `model.generate`, and the bits of logits do not depend on the batch."""
    RUNS = "runs"
    """The output is that of `model.generate`; exact mode finds no shapes."""
    REFUSED = "refused"
    """A worker says at its start why it does not serve the model."""
    WRONG = "wrong"
    """A worker would serve it, and the output is another; or it fails without a reason."""
    UNTRIED = "untried"
    """transformers makes no small model of it."""


@dataclass(frozen=True, slots=True)
class Trial:
    family: str
    verdict: Verdict
    reason: str = ""


def try_family(family: str) -> Trial:
    """In float32 on a CPU, where no two logits are nearly equal. In a main thread, as it uses an alarm."""

    def late(*_: object) -> None:
        raise _TooLongError(f"it takes more than {_SECONDS} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(_SECONDS)
    try:
        return _tried(family)
    except _TooLongError as error:
        return Trial(family, Verdict.UNTRIED, one_line(error))
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


class _TooLongError(BaseException):
    """No error of the model's, so nothing that would be taken for one."""


def _tried(family: str) -> Trial:
    try:
        model = tiny_model(tiny_config(family))
    # Families fail on small sizes in ways of their own.
    except Exception as error:
        return Trial(family, Verdict.UNTRIED, _shown(error))
    with TemporaryDirectory() as folder:
        try:
            model.save_pretrained(folder)
            expected = [_generated(model, prompt) for prompt in _PROMPTS]
        except Exception as error:
            return Trial(family, Verdict.UNTRIED, _shown(error))
        return _served(family, Path(folder), expected)


def _served(family: str, folder: Path, expected: list[list[int]]) -> Trial:
    verdict, reason = Verdict.EXACT, ""
    try:
        try:
            engine = _load(folder, exact=True)
        except ExactModeUnavailableError as error:
            engine, verdict, reason = _load(folder, exact=False), Verdict.RUNS, one_line(error)
    except EngineError as error:
        return Trial(family, Verdict.REFUSED, one_line(error).replace(folder.name, "it"))
    except Exception as error:
        return Trial(family, Verdict.WRONG, f"a worker cannot say why it does not start: {_shown(error)}")
    found = decode(engine, _PROMPTS, _NEW_TOKENS, _WRONG_DRAFTS)
    if [[token for token, _ in output] for output in found] != expected:
        return Trial(family, Verdict.WRONG, "the output is not that of model.generate")
    return Trial(family, verdict, reason)


def _load(folder: Path, exact: bool) -> TargetEngine:
    settings = EngineSettings(
        str(folder), "float32", threads=1, page_size=8, kv_pages=64, max_num_batched_tokens=20, exact=exact
    )
    return load_target_engine(settings, lambda *_: None)


def _generated(model: PreTrainedModel, prompt: Sequence[int]) -> list[int]:
    ids = torch.tensor([prompt])
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=_NEW_TOKENS, do_sample=False, pad_token_id=0
    )
    found: list[int] = output[0, len(prompt) :].tolist()
    return found


def _shown(error: Exception) -> str:
    return f"{type(error).__name__}: {one_line(error)}"[:200]
