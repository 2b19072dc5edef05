"""From settings to an engine that is ready: weights, vocabulary, pages, exact shapes."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Sequence

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from engine.attention import ATTENTION_NAME, AttentionForm, MatmulBackend, free_form
from engine.calibration_cache import calibration_file, calibration_key, read_calibration, write_calibration
from engine.description import EngineDescription
from engine.draft import DraftEngine
from engine.draft_vocabulary import read_draft_vocabulary, restrict_head
from engine.errors import UnsupportedModelError
from engine.exactness import Calibration, ExactShapes, calibrate
from engine.model_source import Progress, fetch_model, resolve_model
from engine.packed_layers import pack_layers
from engine.paged_kv import PagedKv, PagedKvStore
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

# Sizes to warm up where every size is free, and the most rows that verification usually wants logits of.
_WARM_ROWS = (1, 2, 4, 8, 16, 32, 64)
_MOST_WARM_LOGITS = 48

# Of each tensor of weights, the elements that tell one model from another.
_SAMPLED_WEIGHTS = 256


def load_target_engine(settings: EngineSettings, progress: Progress) -> TargetEngine:
    """Raises `engine.errors.EngineError` or `ModelNotFoundError` with the reason, one line."""
    model, vocabulary = _load_model(settings, Role.TARGET, progress)
    numerics = _numerics(model, settings)
    pack_layers(model)
    shapes = _exact_shapes(model, settings, progress) if settings.exact else None
    description, runner, pool = _assemble(model, vocabulary, settings, shapes)
    progress("warming up", None)
    _warm_up(description, runner, pool)
    return TargetEngine(description, runner, pool, PagedKvStore(runner.kv, settings.model, numerics))


def load_draft_engine(settings: EngineSettings, progress: Progress) -> DraftEngine:
    """As `load_target_engine`. A draft has no use for exact shapes: whatever it proposes, the target decides."""
    model, vocabulary = _load_model(settings, Role.DRAFT, progress)
    folder = fetch_model(resolve_model(settings.model, Role.DRAFT), progress)
    token_ids = read_draft_vocabulary(folder, vocabulary.size)
    if token_ids is not None:
        progress(f"drafting with {token_ids.numel()} of {vocabulary.size} tokens", None)
        token_ids = token_ids.to(model.device)
        restrict_head(model, token_ids)
    pack_layers(model)
    description, runner, pool = _assemble(model, vocabulary, settings, None)
    progress("warming up", None)
    _warm_up(description, runner, pool)
    return DraftEngine(description, runner, pool, token_ids, settings.lookup_match)


def use_threads(count: int) -> None:
    """For the operations that the calling thread starts from now on."""
    torch.set_num_threads(count)


def _load_model(settings: EngineSettings, role: Role, progress: Progress) -> tuple[PreTrainedModel, Vocabulary]:
    if settings.threads:
        use_threads(settings.threads)
    folder = fetch_model(resolve_model(settings.model, role), progress)
    progress(f"loading {settings.model}", None)
    disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, settings.dtype), attn_implementation=ATTENTION_NAME
    )
    model = model.to(settings.device).eval()
    _check_supported(model)
    return model, read_vocabulary(folder, model.get_input_embeddings().num_embeddings)


def _numerics(model: PreTrainedModel, settings: EngineSettings) -> bytes:
    """Names the weights, by a sample of each tensor, and in exact mode all that the bits of a pass depend on."""
    digest = hashlib.sha256(calibration_key(model, settings).encode() if settings.exact else b"")
    for name, weights in sorted(model.state_dict().items()):
        sample = weights.flatten()[:_SAMPLED_WEIGHTS].contiguous().cpu().view(torch.uint8)
        digest.update(name.encode() + sample.numpy().tobytes())
    return digest.digest()


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
    _runner(model, pool, free_form(pool.page_size), ()).run([PackedSequence(table, [0, 0], 1)])


def _exact_shapes(model: PreTrainedModel, settings: EngineSettings, progress: Progress) -> ExactShapes:
    file = calibration_file(model, settings)
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

    return calibrate(model, make_runner, settings)


def _runner(model: PreTrainedModel, pool: PagePool, form: AttentionForm, row_counts: Sequence[int]) -> ModelRunner:
    layers, kv_heads, head_dim = _kv_shape(model)
    kv = PagedKv(layers, pool.total_pages, pool.page_size, kv_heads, head_dim, model.dtype, model.device)
    heads = model.config.num_attention_heads
    backend = MatmulBackend(form, heads, kv_heads, pool.page_size, kv.pages, model.dtype, model.device)
    return ModelRunner(model, kv, backend, row_counts)


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
    threads = torch.get_num_threads()
    threads_alone = settings.threads_alone or threads
    if shapes and threads_alone not in shapes.thread_counts:
        logger.warning("%d threads give other bits than %d: steps that are alone use no more", threads_alone, threads)
        threads_alone = threads
    runner = _runner(model, pool, shapes.attention if shapes else free_form(pool.page_size), row_counts)
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
        threads=threads,
        threads_alone=threads_alone,
        kv_bytes_per_token=bytes_per_token,
    )
    return description, runner, pool


def _warm_up(description: EngineDescription, runner: ModelRunner, pool: PagePool) -> None:
    """One pass of every size in use, on every number of threads: kernels are made now and not in the first steps."""
    sizes = [size for size in description.exact_row_counts or _WARM_ROWS if size <= pool.total_pages * pool.page_size]
    sizes = [size for size in sizes if size <= description.max_sequence_length]
    for threads in dict.fromkeys((description.threads_alone, description.threads)):
        use_threads(threads)
        for size in sizes:
            table = PageTable()
            pool.append(table, size)
            runner.run([PackedSequence(table, [0] * size, min(size, _MOST_WARM_LOGITS))])
            pool.free(table)


def _kv_bytes(settings: EngineSettings, device: torch.device) -> int:
    if settings.kv_memory_bytes is not None:
        return settings.kv_memory_bytes
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * _KV_MEMORY_SHARE["cuda"])
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(int(free * _KV_MEMORY_SHARE["cpu"]), _CPU_KV_BYTES)
