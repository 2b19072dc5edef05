"""From settings to an engine that is ready: weights, vocabulary, pages, exact shapes."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from pickle import UnpicklingError

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from engine.attention.paged_step import ATTENTION_NAME
from engine.cpu.kernels import CpuKernels, load_cpu_kernels
from engine.cpu.logits_scan import KernelScan
from engine.cuda.setup import GpuPasses, load_gpu_passes, multiplies_codes
from engine.description import EngineDescription
from engine.drafting.eagle_head import EagleHead
from engine.drafting.head_drafting import HeadDrafting, HeadlessPages
from engine.drafting.model_draft import DraftEngine
from engine.errors import GpuMemoryError, UnsupportedModelError, UnsupportedProcessorError, one_line
from engine.exactness.calibration import ExactShapes, calibrate, candidate_row_counts
from engine.exactness.calibration_cache import calibration_file, calibration_key, read_calibration, write_calibration
from engine.exactness.fingerprint import fingerprint_parts, folder_parts, memory_parts, weight_sample
from engine.kv.groups import lanes_of, page_groups
from engine.kv.kv_store import KvStore
from engine.kv.paged_kv import PagedKvStore
from engine.kv.pages import PagePool, PageTable
from engine.models.compatibility import PROBED_PAGES, check_config, check_passes, fix_frequencies, has_moving_rope
from engine.models.draft_vocabulary import read_draft_vocabulary, restrict_head
from engine.models.drafting_head import head_architecture
from engine.models.dtype import AUTO, COMPUTED, best_dtype, dtype_name
from engine.models.families import FAMILIES
from engine.models.fetching import fetch_model
from engine.models.loaded_model import KvShape, LoadedModel, attention_name
from engine.models.memory_plan import model_memory, plan_memory
from engine.models.source import Progress, longest_sequence, resolve_model
from engine.models.vocabulary import Vocabulary, read_tokenizer, read_vocabulary
from engine.models.weights import check_loaded, safetensors_files, stored_tensors
from engine.parallel.follow import follow
from engine.parallel.lead import Lead, LedKvStore
from engine.parallel.ranks import Ranks, device_of, join_ranks
from engine.parallel.shards import check_divides, read_part
from engine.passes.features import Features
from engine.passes.graph_sizes import graphed_row_counts
from engine.passes.layout import BatchedSequence
from engine.passes.runner import ModelRunner
from engine.quantization.model import (
    build_model,
    is_quantized,
    moved,
    round_weights,
    stored_quantization,
    weights_path,
)
from engine.quantization.sizes import NOT_QUANTIZED, QUANTIZED_FAMILIES, ROUNDED_BITS
from engine.sampling.grammars import Grammars
from engine.sampling.logits_scan import LogitsScan
from engine.sampling.sampler import SamplingContext, sample_tokens
from engine.settings import EngineSettings
from engine.target import TargetEngine
from scheduler.messages import Role
from scheduler.page_counts import PageCounts
from scheduler.sampling import SamplingParameters

logger = logging.getLogger(__name__)

# Without a setting: the share of a CPU's free memory that KV may take, and a cap, for it is shared with everything else
# that runs.
_CPU_KV_SHARE = 0.2
_CPU_KV_BYTES = 4 << 30

# Verification seldom wants logits of more rows.
_MAX_WARM_LOGITS = 48


OtherRanks = Callable[[], tuple[Path, Callable[[str], None]]]
"""Starts the other ranks of a worker, which call `run_rank`: gives the folder where they find each other, and what is
called where they cannot go on (engine/parallel/lead.py)."""


def load_target_engine(
    settings: EngineSettings, progress: Progress, other_ranks: OtherRanks | None = None
) -> TargetEngine:
    """Raises `engine.errors.EngineError` or `ModelNotFoundError` with the reason, one line. `other_ranks` is called
    where the settings ask for several, once the model is known to have as many parts."""
    folder = fetch_model(resolve_model(settings.model, Role.TARGET), progress)
    with ThreadPoolExecutor(1) as beside:
        parts = beside.submit(folder_parts, folder)
        lead = None if other_ranks is None else _gather_ranks(settings, progress, other_ranks)
        loaded = _load_model(settings, Role.TARGET, progress, None if lead is None else lead.ranks)
        head = None if settings.draft_head is None else _load_head(settings.draft_head, loaded, progress)
        return _target_engine(replace(loaded, lead=lead), settings, progress, parts.result, head)


def load_draft_engine(settings: EngineSettings, progress: Progress) -> DraftEngine:
    """As `load_target_engine`. A draft has no use for exact shapes: whatever it proposes, the target decides."""
    folder = fetch_model(resolve_model(settings.model, Role.DRAFT), progress)
    if (architecture := head_architecture(folder)) is not None:
        raise UnsupportedModelError(
            f"{settings.model} is a drafting head ({architecture}): it proposes from what its target computes, and "
            "runs in the target's worker, not in a draft worker (models.draft_kind: head)"
        )
    loaded = _load_model(settings, Role.DRAFT, progress)
    token_ids = read_draft_vocabulary(folder, loaded.vocabulary.size)
    return _draft_engine(loaded, settings, progress, token_ids)


def target_engine_of(model: PreTrainedModel, settings: EngineSettings, progress: Progress) -> TargetEngine:
    """Of a model in memory, made with `attn_implementation=ATTENTION_NAME`, whose layers are replaced in place.

    The model stays on its device and in its dtype, whatever `settings` say of them, and `settings.model` is but a name.
    Without a tokenizer the vocabulary is as large as the embedding, and rows with a grammar fail. Raises EngineError,
    or ValueError for settings that do not fit: on a GPU they must say what KV gets.
    """
    parts = memory_parts(model)
    return _target_engine(_in_memory(model, settings, progress), settings, progress, lambda: parts)


def draft_engine_of(model: PreTrainedModel, settings: EngineSettings, progress: Progress) -> DraftEngine:
    """As `target_engine_of`; proposes all tokens of its vocabulary, and grammars are not followed."""
    return _draft_engine(_in_memory(model, settings, progress), settings, progress)


def _load_head(name: str, loaded: LoadedModel, progress: Progress) -> EagleHead:
    folder = fetch_model(resolve_model(name, Role.DRAFT), progress)
    progress(f"loading {name}", None)
    return EagleHead(folder, loaded.model, loaded.vocabulary.size, loaded.kernels)


def _target_engine(
    loaded: LoadedModel,
    settings: EngineSettings,
    progress: Progress,
    source: Callable[[], dict[str, str]],
    head: EagleHead | None = None,
) -> TargetEngine:
    """`source` gives the parts of the fingerprint that the loaded model no longer shows."""
    loaded = replace(loaded, windows=_check_passes(loaded, settings))
    _check_length(loaded, settings)
    compute_digest = _compute_digest(loaded, settings)
    loaded.replace_layers(settings.page_size)
    shapes = _exact_shapes(loaded, settings, progress) if settings.exact else None
    description, runner, pool = _assemble(loaded, settings, shapes, head)
    features = None if head is None else Features(loaded.model, head.layers, description.max_num_batched_tokens)
    progress("warming up", None)
    _warm_up(loaded, description, runner, pool)
    description = capture_graphs(description, runner, pool, progress)
    description = replace(description, fingerprint=fingerprint_parts(source(), loaded, runner, settings, shapes))
    kv_store: KvStore = PagedKvStore(runner.kv, settings.model, compute_digest)
    if loaded.lead is not None:
        kv_store = LedKvStore(kv_store, loaded.lead)
    drafting = None
    if head is not None and features is not None:
        drafting = HeadDrafting(head, pool, features, logits_scan(loaded, head.token_ids))
        kv_store = HeadlessPages(kv_store, drafting)
    return TargetEngine(description, runner, pool, kv_store, logits_scan(loaded), loaded.grammars, drafting)


def _draft_engine(
    loaded: LoadedModel, settings: EngineSettings, progress: Progress, token_ids: torch.Tensor | None = None
) -> DraftEngine:
    loaded = replace(loaded, windows=_check_passes(loaded, settings))
    if token_ids is not None:
        progress(f"drafting with {token_ids.numel()} of {loaded.vocabulary.size} tokens", None)
        token_ids = token_ids.to(loaded.model.device)
        restrict_head(loaded.model, token_ids)
    loaded.replace_layers(settings.page_size)
    description, runner, pool = _assemble(loaded, settings, None)
    progress("warming up", None)
    _warm_up(loaded, description, runner, pool)
    description = capture_graphs(description, runner, pool, progress)
    scan = logits_scan(loaded, token_ids)
    # On a CPU there is no wait to be saved.
    chained = loaded.model.device.type != "cpu"
    return DraftEngine(description, runner, pool, scan, token_ids, settings.lookup_match, loaded.grammars, chained)


def run_rank(settings: EngineSettings, rank: int, folder: Path, loaded_all: Callable[[], None]) -> None:
    """Runs one of the other ranks of a target until rank 0 is gone, as `follow` does. `settings` are those of rank 0,
    and `folder` is where the ranks find each other. Calls `loaded_all` once it has its part of the model."""
    device = device_of(rank, torch.device(settings.device))
    ranks = join_ranks(folder, rank, settings.tensor_parallel_size, device)
    loaded = _load_model(replace(settings, device=str(device)), Role.TARGET, lambda *_: None, ranks)
    loaded.replace_layers(settings.page_size)
    loaded_all()
    follow(loaded, ranks)


def use_threads(count: int) -> None:
    """For the operations that the calling thread starts from now on."""
    torch.set_num_threads(count)


def _gather_ranks(settings: EngineSettings, progress: Progress, other_ranks: OtherRanks) -> Lead:
    model, size = fetch_model(resolve_model(settings.model, Role.TARGET), progress), settings.tensor_parallel_size
    check_divides(_read_config(model), size)
    folder, broken = other_ranks()
    progress(f"waiting for {size - 1} other ranks", None)
    return Lead(join_ranks(folder, 0, size, torch.device(settings.device)), broken)


def _load_model(settings: EngineSettings, role: Role, progress: Progress, ranks: Ranks | None = None) -> LoadedModel:
    """With `ranks`, this rank's part of it."""
    if settings.threads:
        use_threads(settings.threads)
    folder = fetch_model(resolve_model(settings.model, role), progress)
    progress(f"loading {settings.model}", None)
    disable_progress_bar()
    device = torch.device(settings.device)
    planned_kv_bytes = _planned_kv_bytes(settings, role, folder, device)
    config = _read_config(folder)
    source = weights_path(folder)
    quantization = stored_quantization(source, config)
    if quantization == NOT_QUANTIZED:
        model, kernels = _read_plain(folder, config, device, settings, ranks, progress)
        quantization = _round(model, device, settings, kernels, progress)
    else:
        model, kernels, kept = _read_quantized(source, config, quantization, device, settings, ranks, progress)
        quantization = quantization if kept else NOT_QUANTIZED
    if kernels is not None:
        _report(f"CPU kernels for {kernels.isa}", progress)
    model = moved(model, device).eval()
    fix_frequencies(model, settings.max_model_len)
    gpu = _gpu_passes(model, settings, settings.cuda_graphs and ranks is None, progress)
    vocabulary = read_vocabulary(folder, model.get_input_embeddings().num_embeddings)
    tokenizer = read_tokenizer(folder) if ranks is None or ranks.rank == 0 else None
    grammars = None if tokenizer is None else Grammars(tokenizer, beside_model=device.type != "cpu")
    return LoadedModel(
        model,
        vocabulary,
        kernels,
        gpu,
        planned_kv_bytes,
        grammars,
        quantization=quantization,
        quantized_kv=settings.quantized_kv,
    )


def _read_plain(
    folder: Path,
    config: PreTrainedConfig,
    device: torch.device,
    settings: EngineSettings,
    ranks: Ranks | None,
    progress: Progress,
) -> tuple[PreTrainedModel, CpuKernels | None]:
    model = _read_model(folder, config, settings.dtype, ranks)
    kernels = _cpu_kernels(model.dtype, device, settings, progress)
    if settings.dtype == AUTO:
        dtype, reason = best_dtype(model.dtype, device, kernels is not None)
        if dtype != model.dtype:
            model = model.to(dtype)
            kernels = _cpu_kernels(dtype, device, settings, progress)
        _report(f"dtype {dtype_name(dtype)}: {reason}", progress)
    return model, kernels


def _read_quantized(
    source: Path,
    config: PreTrainedConfig,
    quantization: str,
    device: torch.device,
    settings: EngineSettings,
    ranks: Ranks | None,
    progress: Progress,
) -> tuple[PreTrainedModel, CpuKernels | None, bool]:
    """The model, its kernels, and whether its weights are still quantised: where no kernel takes them, or the settings
    say so, they are expanded."""
    if settings.quantization in ROUNDED_BITS:
        raise UnsupportedModelError(
            f"quantization is {settings.quantization!r}, must be auto or none: "
            f"{source.name} is quantised already ({quantization})"
        )
    own = config.dtype if config.dtype in COMPUTED else torch.bfloat16
    dtype = own if settings.dtype == AUTO else getattr(torch, settings.dtype)
    kernels = _cpu_kernels(dtype, device, settings, progress)
    if settings.dtype == AUTO:
        best, reason = best_dtype(dtype, device, kernels is not None)
        if best != dtype:
            dtype, kernels = best, _cpu_kernels(best, device, settings, progress)
        _report(f"dtype {dtype_name(dtype)}: {reason}", progress)
    known = settings.quantization == AUTO and config.model_type in QUANTIZED_FAMILIES
    keep = known and _takes_codes(kernels, dtype, device)
    try:
        model = build_model(source, config, dtype, keep, ranks)
    except UnsupportedModelError:
        raise
    except (OSError, ValueError, LookupError, RuntimeError) as error:
        raise _cannot_load(source, error) from error
    if is_quantized(model):
        _report(f"weights: {quantization}", progress)
        return model, kernels, True
    size = sum(weights.nbytes for weights in model.parameters()) >> 20
    reason = "quantization is 'none'" if settings.quantization != AUTO else "no kernel here multiplies what is stored"
    _report(f"weights: {quantization}, expanded to {dtype_name(dtype)}, {size} MiB: {reason}", progress)
    return model, kernels, False


def _round(
    model: PreTrainedModel,
    device: torch.device,
    settings: EngineSettings,
    kernels: CpuKernels | None,
    progress: Progress,
) -> str:
    """Rounds the weights of a plain model where the settings say so; gives the name of its quantisation."""
    bits = ROUNDED_BITS.get(settings.quantization)
    if bits is None:
        return NOT_QUANTIZED
    if model.config.model_type not in FAMILIES or not _takes_codes(kernels, model.dtype, device):
        _report(f"weights stay as they are: no kernel takes {settings.quantization} here", progress)
        return NOT_QUANTIZED
    progress(f"rounding weights to {bits} bits", None)
    round_weights(model, bits)
    _report(f"weights: {settings.quantization}", progress)
    return settings.quantization


def _takes_codes(kernels: CpuKernels | None, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether there are kernels that multiply by quantised weights."""
    return kernels is not None or (device.type == "cuda" and multiplies_codes(dtype, device))


def _in_memory(model: PreTrainedModel, settings: EngineSettings, progress: Progress) -> LoadedModel:
    if model.config._attn_implementation != ATTENTION_NAME:
        raise ValueError(f"attn_implementation is {model.config._attn_implementation!r}, must be {ATTENTION_NAME!r}")
    if settings.tensor_parallel_size != 1:
        raise ValueError(f"tensor_parallel_size is {settings.tensor_parallel_size}, must be 1 for a model in memory")
    if model.device.type == "cuda" and settings.kv_pages is None and settings.kv_memory_bytes is None:
        raise ValueError("kv_pages and kv_memory_bytes are None, one must be set for a model in a GPU's memory")
    check_config(model.config)
    if settings.threads:
        use_threads(settings.threads)
    model.eval()
    fix_frequencies(model, settings.max_model_len)
    kernels = _cpu_kernels(model.dtype, model.device, settings, progress)
    vocabulary = Vocabulary(b"", model.get_input_embeddings().num_embeddings)
    quantization = _round(model, model.device, settings, kernels, progress)
    gpu = _gpu_passes(model, settings, settings.cuda_graphs, progress)
    quantized_kv = settings.quantized_kv
    return LoadedModel(model, vocabulary, kernels, gpu, quantization=quantization, quantized_kv=quantized_kv)


def _gpu_passes(model: PreTrainedModel, settings: EngineSettings, graphs: bool, progress: Progress) -> GpuPasses | None:
    if model.device.type != "cuda":
        return None
    shape = KvShape.of(model.config)
    heads = (model.config.num_attention_heads, shape.kv_heads, shape.head_dim)
    has_rules = any(getattr(model.config, name, None) for name in ("sliding_window", "attn_logit_softcapping"))
    return load_gpu_passes(model.dtype, model.device, heads, graphs, progress, has_rules, settings.quantized_kv)


def logits_scan(loaded: LoadedModel, token_ids: torch.Tensor | None = None) -> LogitsScan:
    """`token_ids` as in `sample_tokens`. On a GPU by Triton kernels, if they choose what torch chooses on a CPU."""
    if loaded.gpu is None:
        return LogitsScan() if loaded.kernels is None else KernelScan(loaded.kernels)
    # Triton is made for Linux only.
    from engine.cuda.triton_sampling import TritonScan

    model, size = loaded.model, loaded.vocabulary.size if token_ids is None else token_ids.numel()
    wide = torch.randn(32, -(-size // 16) * 16, generator=torch.Generator().manual_seed(0)).to(model.dtype)
    rows = [SamplingContext(SamplingParameters(temperature=n // 8 * 0.4, seed=n), n, (), 0) for n in range(32)]
    scan, logits, on_gpu = TritonScan(), wide[:, :size], wide.to(model.device)[:, :size]
    try:
        found = [sample_tokens(on_gpu[:count], rows[:count], token_ids, scan) for count in (8, 32)]
    # Triton has errors of its own, and those of the compiler that it calls.
    except Exception as error:
        logger.warning("tokens are chosen by torch, as the Triton kernels cannot be made: %s", one_line(error))
        return LogitsScan()
    expected = sample_tokens(logits, rows, None if token_ids is None else token_ids.cpu())
    if found != [expected[:8], expected]:
        logger.warning("tokens are chosen by torch, as the Triton kernels choose others")
        return LogitsScan()
    return scan


def _check_passes(loaded: LoadedModel, settings: EngineSettings) -> tuple[int | None, ...]:
    """Gives the windows of the layers."""
    if loaded.quantization != NOT_QUANTIZED:
        # Its family is a proved one, and a trial would expand all weights several times.
        attentions = [module for module in loaded.model.modules() if hasattr(module, "scaling")]
        windows = {module.layer_idx: getattr(module, "sliding_window", None) for module in attentions}
        return tuple(windows[layer] for layer in range(KvShape.of(loaded.model.config).layers))
    pool = PagePool(PROBED_PAGES, settings.page_size)
    # Compared with the model's own attention, which rounds no KV.
    loaded = replace(loaded, quantized_kv=False)
    return check_passes(loaded.runner(pool, loaded.unrestricted_form(settings.page_size), ()), pool)


def _read_config(folder: Path) -> PreTrainedConfig:
    try:
        config = AutoConfig.from_pretrained(folder)
    # No JSON, fields of a wrong type, a type that transformers does not know or that comes with code of its own.
    except (OSError, ValueError, KeyError, TypeError, ImportError, StrictDataclassError) as error:
        raise _cannot_load(folder, error) from error
    check_config(config)
    return config


def _read_model(folder: Path, config: PreTrainedConfig, dtype: str, ranks: Ranks | None) -> PreTrainedModel:
    try:
        if ranks is not None:
            return read_part(folder, config, dtype, ranks)
        stored = stored_tensors(safetensors_files(folder))
        model, report = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            attn_implementation=ATTENTION_NAME,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    # A type that is no causal model or comes with code of its own, or pickled weights that are damaged.
    except (OSError, ValueError, LookupError, ImportError, RuntimeError, EOFError, UnpicklingError) as error:
        if error.args == (ATTENTION_NAME,):
            raise UnsupportedModelError("the model does not use transformers' attention interface") from error
        raise _cannot_load(folder, error) from error
    check_loaded(folder, model, report, stored)
    return model


def _cannot_load(folder: Path, error: Exception) -> UnsupportedModelError:
    return UnsupportedModelError(f"transformers cannot load {folder.name}: {one_line(error)}")


def _cpu_kernels(
    dtype: torch.dtype, device: torch.device, settings: EngineSettings, progress: Progress
) -> CpuKernels | None:
    if device.type != "cpu" or dtype not in COMPUTED:
        return None
    try:
        return load_cpu_kernels(dtype, progress, settings.cpu_isa)
    except ValueError as error:
        raise UnsupportedProcessorError(str(error)) from error


def _report(message: str, progress: Progress) -> None:
    progress(message, None)
    logger.info("%s", message)


def _compute_digest(loaded: LoadedModel, settings: EngineSettings) -> bytes:
    """Names the weights, by a sample of each tensor, and in exact mode all that the bits of a pass depend on."""
    key = calibration_key(loaded.model, settings, loaded.kernel_identity)
    digest = hashlib.sha256(key.encode() if settings.exact else str(settings.tensor_parallel_size).encode())
    if has_moving_rope(loaded.model.config):
        digest.update(str(settings.max_model_len).encode())
    for name, weights in sorted(loaded.model.state_dict().items()):
        digest.update(name.encode() + weight_sample(weights))
    return digest.digest()


def _check_length(loaded: LoadedModel, settings: EngineSettings) -> None:
    longest = _positions(loaded.model.config)
    if settings.max_model_len is not None and settings.max_model_len > longest:
        raise UnsupportedModelError(
            f"max_model_len is {settings.max_model_len}, must be at most {longest} for {settings.model}"
        )


def _exact_shapes(loaded: LoadedModel, settings: EngineSettings, progress: Progress) -> ExactShapes:
    file = calibration_file(loaded.model, settings, loaded.kernel_identity)
    calibration = read_calibration(file)
    if calibration is None:
        progress("calibrating exact mode", None)
        calibration = calibrate(loaded.model, loaded.runner, settings, loaded.forms(settings.page_size))
        write_calibration(file, calibration)
    _report(f"exact mode: {calibration.summary()}", progress)
    return calibration.shapes


def _assemble(
    loaded: LoadedModel, settings: EngineSettings, shapes: ExactShapes | None, head: EagleHead | None = None
) -> tuple[EngineDescription, ModelRunner, PagePool]:
    model, vocabulary = loaded.model, loaded.vocabulary
    longest, shape = _positions(loaded.model.config), KvShape.of(model.config)
    longest = min(longest, settings.max_model_len or longest)
    # A drafting head has its KV on the same pages, and sees everything.
    windows = [None if head is not None or (window or longest) >= longest else window for window in loaded.windows]
    groups = page_groups(windows)
    lanes, of_a_layer = lanes_of(groups, shape.layers), shape.bytes_of_layer(model.dtype, loaded.quantized_kv)
    page_bytes = lanes * of_a_layer * settings.page_size
    page_bytes += 0 if head is None else head.bytes_per_page(settings.page_size)
    pages = settings.kv_pages or max(1, _kv_bytes(settings, loaded, 0 if head is None else head.nbytes) // page_bytes)
    pool = PagePool(pages, settings.page_size, groups)
    exact_row_counts = shapes.row_counts if shapes else ()
    # Few in any case: libraries keep a kernel, and its memory, for every row count they met.
    row_counts = exact_row_counts or candidate_row_counts(settings.max_num_batched_tokens)
    runner = loaded.runner(pool, shapes.attention if shapes else loaded.unrestricted_form(pool.page_size), row_counts)
    spans = tuple(settings.page_size * group.slices for group in groups)
    counts = PageCounts(spans, tuple(group.window or 0 for group in groups), row_counts[-1])
    longest = counts.longest(pages, longest)
    if not longest:
        raise UnsupportedModelError(f"KV has {pages} pages, must have at least {len(groups)}")
    description = EngineDescription(
        model_id=settings.model,
        tokenizer_digest=vocabulary.digest,
        vocabulary_size=vocabulary.size,
        dtype=dtype_name(model.dtype),
        quantization=loaded.quantization,
        kv_cache_dtype=dtype_name(runner.kv.layers[0].pool.dtype),
        device=str(model.device),
        page_size=settings.page_size,
        total_pages=pages,
        max_sequence_length=longest,
        max_num_batched_tokens=row_counts[-1],
        exact_row_counts=exact_row_counts,
        threads=torch.get_num_threads(),
        kv_bytes_per_token=page_bytes * counts.pages_for(longest) // longest * settings.tensor_parallel_size,
        page_spans=counts.spans,
        page_windows=counts.windows,
        attention=attention_name(runner.backend),
        head_id="" if head is None else head.name,
    )
    return description, runner, pool


def _positions(config: PreTrainedConfig) -> int:
    return longest_sequence(int(config.max_position_embeddings), getattr(config, "rope_parameters", None))


def _warm_up(loaded: LoadedModel, description: EngineDescription, runner: ModelRunner, pool: PagePool) -> None:
    """Runs one pass of each row count, so that libraries make their kernels now and not in the first steps.

    Spool's own kernels are the same for all row counts, so that the smallest and the largest pass will do.
    """
    sizes = [size for size in runner.row_counts if size <= description.max_sequence_length]
    if loaded.kernels is not None:
        sizes = sizes[:: max(1, len(sizes) - 1)]
    for size in sizes:
        table = PageTable()
        pool.append(table, size)
        runner.run([BatchedSequence(table, [0] * size, min(size, _MAX_WARM_LOGITS))])
        pool.free(table)


def capture_graphs(
    description: EngineDescription, runner: ModelRunner, pool: PagePool, progress: Progress
) -> EngineDescription:
    """Passes of few rows as CUDA graphs, where there are any, and in exact mode only if they give the same bits. The
    description says which row counts have one, and `progress` hears why none has."""
    graphs = runner.graphs
    if graphs is None:
        return description
    row_counts = graphed_row_counts(runner.row_counts, description.max_sequence_length)
    progress(f"capturing CUDA graphs of {len(row_counts)} row counts", None)
    failure = None
    try:
        graphs.capture(row_counts)
    # What a model does in a pass may be nothing that can be captured, and torch says so in many ways.
    except Exception as error:
        failure = f"as this model's passes cannot be captured: {_reasons(error)}"
    if (
        failure is None
        and description.exact_row_counts
        and not _agree_with_graphs(description, runner, pool, row_counts)
    ):
        failure = "as they give other bits than the same passes without them"
    if failure is not None:
        graphs.clear()
        torch.cuda.empty_cache()
        logger.warning("no CUDA graphs, %s", failure)
        progress(f"no CUDA graphs, {failure}", None)
    return replace(description, graphed_row_counts=graphs.row_counts)


def _reasons(error: BaseException | None) -> str:
    """All of a chain of errors: what ends a broken capture raises one of its own."""
    reasons = []
    while error is not None:
        reasons.append(one_line(error))
        error = error.__context__
    return ", after ".join(reasons)


def _agree_with_graphs(
    description: EngineDescription, runner: ModelRunner, pool: PagePool, row_counts: Sequence[int]
) -> bool:
    """Whether passes of the most and of the fewest rows that run on each graph give the bits that they give without."""
    without = ModelRunner(runner.model, runner.kv, runner.backend, runner.row_counts)
    for rows in sorted({*row_counts, 1, *(count + 1 for count in row_counts[:-1])}):
        table = PageTable()
        pool.append(table, rows)
        sequence = BatchedSequence(table, [row % description.vocabulary_size for row in range(rows)], rows)
        graphed = runner.run([sequence]).logits.clone()
        agree = torch.equal(graphed, without.run([sequence]).logits)
        pool.free(table)
        if not agree:
            return False
    return True


def _planned_kv_bytes(settings: EngineSettings, role: Role, folder: Path, device: torch.device) -> int | None:
    """What the plan of a GPU's memory gives to the KV of this worker; None where settings do, and on a CPU."""
    if device.type != "cuda" or settings.kv_pages or settings.kv_memory_bytes:
        return None
    ranks = settings.tensor_parallel_size
    rows, quantization = settings.max_num_batched_tokens, settings.quantization
    quantized_kv, longest = settings.quantized_kv, settings.max_model_len
    own = model_memory(
        role.value, folder, settings.dtype, rows, ranks, quantization, quantized_kv=quantized_kv, max_model_len=longest
    )
    here = -(-ranks // torch.cuda.device_count())
    total = torch.cuda.mem_get_info(device)[1]
    return plan_memory(total, settings.gpu_memory_utilization, (*[own] * here, *settings.gpu_peers))[0]


def _kv_bytes(settings: EngineSettings, loaded: LoadedModel, head_bytes: int) -> int:
    """Of what was planned for KV, the weights of a head get theirs."""
    if settings.kv_memory_bytes is not None:
        return settings.kv_memory_bytes
    planned, device = loaded.planned_kv_bytes, loaded.model.device
    if planned is None:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return min(int(free * _CPU_KV_SHARE), _CPU_KV_BYTES)
    torch.cuda.empty_cache()
    planned -= head_bytes
    free = torch.cuda.mem_get_info(device)[0]
    logger.info("%s: %d MiB are free beside the weights, KV gets %d", device, free >> 20, planned >> 20)
    if planned > free:
        raise GpuMemoryError(
            f"KV is to have {planned >> 20} MiB of {device}, of which {free >> 20} MiB are free: other programs use "
            f"it (gpu_memory_utilization is {settings.gpu_memory_utilization:g})"
        )
    return planned
