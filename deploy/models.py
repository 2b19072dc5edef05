"""Gets the models of a run ready and checks, before any worker starts, that they go together."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from spool.deploy.config.models import DEMO, NGRAM, NO_DRAFT
from spool.deploy.config.spool_config import SpoolConfig
from spool.deploy.errors import RunError, UsageError
from spool.deploy.progress import Reporter, say
from spool.deploy.workers import worker_memory
from spool.engine.demo.build import DemoBuildError
from spool.engine.drafting.token_map import map_tokens
from spool.engine.errors import GpuMemoryError, TokenizerError, UnsupportedModelError
from spool.engine.models.drafting_head import MTP
from spool.engine.models.fetching import fetch_model
from spool.engine.models.memory_plan import plan_memory
from spool.engine.models.source import DEMO_HEAD, ModelNotFoundError, longest_sequence, resolve_model
from spool.engine.settings import EngineSettings
from spool.scheduler.messages import Role
from spool.services.gateway.settings import not_followed
from spool.services.text.chat_template import ChatTemplateError
from spool.services.text.tokenizer import ModelTokenizer


@dataclass(frozen=True, slots=True)
class ReadyModels:
    """A sequence has at most `max_positions` tokens."""

    target_folder: Path
    tokenizer: ModelTokenizer
    max_positions: int


def prepare_models(config: SpoolConfig, reporter: Reporter) -> ReadyModels:
    """Builds or downloads what is missing.

    Raises `UsageError` for a model that does not exist, a draft that does not fit the target, or a `max_model_len`
    above what the target takes.
    """
    models, max_model_len = config.models, config.engine.max_model_len
    target_folder = fetch(models.target, Role.TARGET, reporter)
    draft_folder = None
    head = config.draft_head
    if head is not None and head != MTP:
        fetch(head, Role.DRAFT, reporter)
    elif models.drafts_with_model:
        draft_folder = fetch(models.draft_name, Role.DRAFT, reporter)
    try:
        tokenizer = ModelTokenizer(target_folder, models.template_text())
        if models.chat_template is not None:
            tokenizer.chat_template()
    except ChatTemplateError as error:
        raise UsageError(f"models.chat_template is {models.chat_template}: {error}") from error
    except TokenizerError as error:
        raise UsageError(str(error)) from error
    try:
        if draft_folder is not None and draft_folder != target_folder:
            map_tokens(target_folder, draft_folder)
    except TokenizerError as error:
        raise UsageError(
            f"the draft {models.draft_name} does not fit the target {models.target}: {error} "
            f"(--draft {NGRAM} and --draft {NO_DRAFT} fit any target)"
        ) from error
    try:
        warning = not_followed(target_folder)
    except ValueError as error:
        raise UsageError(str(error)) from error
    if warning is not None:
        say(f"warning: {warning}")
    longest = _max_positions(target_folder)
    if max_model_len is not None and max_model_len > longest:
        raise UsageError(f"max_model_len is {max_model_len}, must be at most {longest}, the limit of {models.target}")
    return ReadyModels(target_folder, tokenizer, max_model_len or longest)


def fetch(name: str, role: Role, reporter: Reporter) -> Path:
    """The folder of a model, built or downloaded where it has to be."""
    try:
        source = resolve_model(name, role)
        return fetch_model(source, lambda message, fraction: reporter.stage(name, message, fraction))
    except (ModelNotFoundError, UnsupportedModelError) as error:
        raise UsageError(f"{role.value} model {error}") from error
    except DemoBuildError as error:
        raise RunError(str(error)) from error


def fetch_models(
    names: Sequence[str], dtype: str, quantization: str, kv_cache_dtype: str, gpu_memory: float | None
) -> None:
    """Makes models ready, and says where they are and what they take of a CPU's memory, or of `gpu_memory` GiB of a GPU
    that they share; the demo is a pair and a head. Raises `UsageError` and `RunError`."""
    workers = []
    for name in names:
        if name == DEMO:
            say(f"{name} head: {fetch(DEMO_HEAD, Role.DRAFT, Reporter())}")
        for role in (Role.TARGET, Role.DRAFT) if name == DEMO else (Role.TARGET,):
            folder = fetch(name, role, Reporter())
            say(f"{name} {role.value}: {folder}")
            try:
                device = "cpu" if gpu_memory is None else "cuda"
                engine = EngineSettings(name, dtype, quantization, device, kv_cache_dtype=kv_cache_dtype)
                memory = worker_memory(engine, role)
            except UsageError as error:
                if gpu_memory is not None:
                    raise
                say(str(error))
                continue
            of_a_token = memory.kv_bytes_per_token
            say(
                f"{name} {role.value}: quantization {memory.quantization}, up to {memory.weights / 2**20:,.0f} MiB of "
                f"weights, {of_a_token / 2**10:,.1f} KiB of KV for each token, so "
                f"{2**30 // of_a_token:,} tokens for each GiB"
            )
            workers.append(memory)
    if gpu_memory is None or not workers:
        return
    try:
        kv_bytes = plan_memory(int(gpu_memory * 2**30), engine.gpu_memory_utilization, workers)
    except GpuMemoryError as error:
        raise RunError(str(error)) from error
    say(f"a GPU of {gpu_memory:g} GiB also has room for {kv_bytes[0] // workers[0].kv_bytes_per_token:,} tokens of KV")


def _max_positions(folder: Path) -> int:
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        config = config.get("text_config", config)
        positions = config["max_position_embeddings"]
    except (OSError, ValueError, AttributeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    except KeyError as error:
        raise UsageError(f"{path} has no max_position_embeddings") from error
    if not isinstance(positions, int) or positions < 1:
        raise UsageError(f"{path}: max_position_embeddings is {positions!r}, must be a positive number")
    return longest_sequence(positions, config.get("rope_parameters") or config.get("rope_scaling"))
