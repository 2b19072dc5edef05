"""From settings to an engine that is ready: weights, vocabulary, pages, exact shapes."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from engine.attention import ATTENTION_NAME, AttentionForm, SdpaBackend
from engine.calibration_cache import calibration_file, read_calibration, write_calibration
from engine.description import EngineDescription
from engine.draft import DraftEngine
from engine.errors import UnsupportedModelError
from engine.exactness import Calibration, ExactShapes, calibrate
from engine.model_source import Progress, fetch_model, resolve_model
from engine.paged_kv import PagedKv
from engine.pages import PagePool, PageTable
from engine.runner import ModelRunner, PackedSequence
from engine.settings import EngineSettings
from engine.target import TargetEngine
from engine.vocabulary import Vocabulary, read_vocabulary
from scheduler.messages import Role

logger = logging.getLogger(__name__)

# Without a setting: the share of the memory free after the weights are loaded that KV may take, and a cap on a CPU,
# where it is shared with everything else that runs.
_KV_MEMORY_SHARE = {"cpu": 0.2, "cuda": 0.85}
_CPU_KV_BYTES = 4 << 30


def load_target_engine(settings: EngineSettings, progress: Progress) -> TargetEngine:
    """Raises `engine.errors.EngineError` or `ModelNotFoundError` with the reason, one line."""
    model, vocabulary = _load_model(settings, Role.TARGET, progress)
    shapes = _exact_shapes(model, settings, progress) if settings.exact else None
    description, runner, pool = _assemble(model, vocabulary, settings, shapes)
    return TargetEngine(description, runner, pool)


def load_draft_engine(settings: EngineSettings, progress: Progress) -> DraftEngine:
    """As `load_target_engine`. A draft has no use for exact shapes: whatever it proposes, the target decides."""
    model, vocabulary = _load_model(settings, Role.DRAFT, progress)
    return DraftEngine(*_assemble(model, vocabulary, settings, None))


def _load_model(settings: EngineSettings, role: Role, progress: Progress) -> tuple[PreTrainedModel, Vocabulary]:
    if settings.threads:
        torch.set_num_threads(settings.threads)
    folder = fetch_model(resolve_model(settings.model, role), progress)
    progress(f"loading {settings.model}", None)
    disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, settings.dtype), attn_implementation=ATTENTION_NAME
    )
    model = model.to(settings.device).eval()
    _check_supported(model)
    return model, read_vocabulary(folder, model.get_input_embeddings().num_embeddings)


def _check_supported(model: PreTrainedModel) -> None:
    config = model.config
    layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
    if layer_types != {"full_attention"}:
        raise UnsupportedModelError(
            f"{config.model_type} has layers of type {', '.join(sorted(layer_types))}, only full_attention is supported"
        )
    # Whatever else does not fit shows in a pass.
    pool = PagePool(1, 8)
    table = PageTable()
    pool.append(table, 2)
    _runner(model, pool, AttentionForm(), ()).run([PackedSequence(table, [0, 0], 1)])


def _exact_shapes(model: PreTrainedModel, settings: EngineSettings, progress: Progress) -> ExactShapes:
    file = calibration_file(model, settings.page_size, settings.max_packed_rows)
    calibration = read_calibration(file)
    if calibration is None:
        progress("calibrating exact mode", None)
        calibration = _calibrate(model, settings)
        write_calibration(file, calibration)
    progress(f"exact mode: {calibration.summary()}", None)
    logger.info("exact mode: %s", calibration.summary())
    return calibration.shapes


def _calibrate(model: PreTrainedModel, settings: EngineSettings) -> Calibration:
    def make_runner(pool: PagePool, form: AttentionForm, row_counts: Sequence[int]) -> ModelRunner:
        return _runner(model, pool, form, row_counts)

    return calibrate(model, make_runner, settings.page_size, settings.max_packed_rows)


def _runner(model: PreTrainedModel, pool: PagePool, form: AttentionForm, row_counts: Sequence[int]) -> ModelRunner:
    layers, kv_heads, head_dim = _kv_shape(model)
    kv = PagedKv(layers, pool.total_pages, pool.page_size, kv_heads, head_dim, model.dtype, model.device)
    group = model.config.num_attention_heads // kv_heads
    return ModelRunner(model, kv, SdpaBackend(form, group, pool.page_size, model.dtype, model.device), row_counts)


def _kv_shape(model: PreTrainedModel) -> tuple[int, int, int]:
    config = model.config
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return config.num_hidden_layers, kv_heads, head_dim


def _assemble(
    model: PreTrainedModel, vocabulary: Vocabulary, settings: EngineSettings, shapes: ExactShapes | None
) -> tuple[EngineDescription, ModelRunner, PagePool]:
    layers, kv_heads, head_dim = _kv_shape(model)
    bytes_per_token = 2 * layers * kv_heads * head_dim * model.dtype.itemsize
    pages = settings.kv_pages or max(1, _kv_bytes(settings, model.device) // (bytes_per_token * settings.page_size))
    pool = PagePool(pages, settings.page_size)
    row_counts = shapes.row_counts if shapes else ()
    runner = _runner(model, pool, shapes.attention if shapes else AttentionForm(), row_counts)
    description = EngineDescription(
        model_id=settings.model,
        tokenizer_digest=vocabulary.digest,
        vocabulary_size=vocabulary.size,
        dtype=settings.dtype,
        device=str(model.device),
        page_size=settings.page_size,
        total_pages=pages,
        max_sequence_length=min(int(model.config.max_position_embeddings), pages * settings.page_size),
        max_packed_rows=row_counts[-1] if row_counts else settings.max_packed_rows,
        exact_row_counts=row_counts,
        threads=torch.get_num_threads(),
        kv_bytes_per_token=bytes_per_token,
    )
    return description, runner, pool


def _kv_bytes(settings: EngineSettings, device: torch.device) -> int:
    if settings.kv_memory_bytes is not None:
        return settings.kv_memory_bytes
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * _KV_MEMORY_SHARE["cuda"])
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(int(free * _KV_MEMORY_SHARE["cpu"]), _CPU_KV_BYTES)
