"""From settings to an engine that is ready: weights, vocabulary, pages, exact shapes."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from spool.engine.cpu.threads import run_on_any_processor
from spool.engine.description import EngineDescription
from spool.engine.drafting.head import DraftingHead
from spool.engine.drafting.head_drafting import HeadDrafting
from spool.engine.drafting.head_passes import MOST_GRAPHED_ROWS
from spool.engine.drafting.model_draft import DraftEngine
from spool.engine.drafting.mtp_head import MtpHead
from spool.engine.drafting.speculators.drafters import drafter_class
from spool.engine.drafting.token_map import TokenMap, map_tokens
from spool.engine.errors import DraftVocabularyError, UnsupportedModelError
from spool.engine.exactness.calibration import calibrate, candidate_row_counts
from spool.engine.exactness.calibration_cache import (
    calibration_file,
    calibration_key,
    read_calibration,
    write_calibration,
)
from spool.engine.exactness.fingerprint import fingerprint_parts, folder_parts, memory_parts, weight_sample
from spool.engine.kv.groups import lanes_of, page_groups
from spool.engine.kv.kv_store import KvStore
from spool.engine.kv.memory import kv_bytes
from spool.engine.kv.paged_kv import PagedKvStore
from spool.engine.kv.pages import PagePool
from spool.engine.layers.describing import windows
from spool.engine.models.compatibility import has_moving_rope, windows_in_pass
from spool.engine.models.draft_vocabulary import feed_as, read_draft_vocabulary, restrict_head
from spool.engine.models.drafting_head import MTP, head_architecture
from spool.engine.models.dtype import dtype_name
from spool.engine.models.fetching import fetch_model, fetch_tokenizer
from spool.engine.models.kernels import head_passes, logits_scan
from spool.engine.models.loaded_model import LoadedModel, attention_name
from spool.engine.models.reading import model_in_memory, read_config, read_model, report
from spool.engine.models.replaced_layers import replace_layers
from spool.engine.models.source import ModelNotFoundError, Progress, longest_sequence, resolve_model
from spool.engine.parallel.follow import follow
from spool.engine.parallel.lead import Lead, LedKvStore
from spool.engine.parallel.ranks import device_of, join_ranks
from spool.engine.parallel.shards import check_divides, sums_as_one
from spool.engine.passes.features import Features
from spool.engine.passes.runner import ModelRunner
from spool.engine.passes.warm_up import capture_graphs, warm_up
from spool.engine.sampling.grammars import Grammars
from spool.engine.settings import EngineSettings
from spool.engine.target import TargetEngine
from spool.scheduler.messages import Role
from spool.scheduler.page_counts import PageCounts

logger = logging.getLogger(__name__)

# Tokens of a pass that computes one after the other, so that a step does not take too long.
_ONE_BY_ONE = 32
# Of sequences of a model whose configuration gives no limit.
_UNLIMITED = 1 << 20

OtherRanks = Callable[[], tuple[Path, Callable[[str], None]]]
"""Starts the other ranks of a worker, which call `run_rank`: gives the folder where they find each other, and what is
called where they cannot go on (engine/parallel/lead.py)."""


def load_target_engine(
    settings: EngineSettings, progress: Progress, other_ranks: OtherRanks | None = None
) -> TargetEngine:
    """Raises `EngineError` or `ModelNotFoundError` with the reason, one line. `other_ranks` is called
    where the settings ask for several, once the model is known to have as many parts."""
    folder = fetch_model(resolve_model(settings.model, Role.TARGET), progress)
    with ThreadPoolExecutor(1, initializer=run_on_any_processor) as beside:
        parts = beside.submit(folder_parts, folder)
        lead = None if other_ranks is None else _gather_ranks(folder, settings, progress, other_ranks)
        loaded = read_model(folder, settings, Role.TARGET, progress, None if lead is None else lead.ranks)
        head = None if settings.draft_head is None else _load_head(settings, folder, loaded, progress)
        return _target_engine(replace(loaded, lead=lead), settings, progress, parts.result, head)


def load_draft_engine(settings: EngineSettings, progress: Progress) -> DraftEngine:
    """As `load_target_engine`. A draft has no use for exact shapes: whatever it proposes, the target decides."""
    folder = fetch_model(resolve_model(settings.model, Role.DRAFT), progress)
    if (architecture := head_architecture(folder)) is not None:
        raise UnsupportedModelError(
            f"{settings.model} is a drafting head ({architecture}): it proposes from what its target computes, and "
            "runs in the target's worker, not in a draft worker (models.draft_kind: head)"
        )
    with ThreadPoolExecutor(1) as beside:
        mapping = beside.submit(_token_map, settings, folder, progress)
        loaded = read_model(folder, settings, Role.DRAFT, progress)
        own = read_draft_vocabulary(folder, loaded.vocabulary.size)
        return _draft_engine(loaded, settings, progress, own, mapping.result())


def _token_map(settings: EngineSettings, folder: Path, progress: Progress) -> TokenMap | None:
    """Of the draft in `folder`; None where it takes the target's token ids as they are."""
    if settings.target is None:
        return None
    try:
        target = fetch_tokenizer(resolve_model(settings.target, Role.TARGET), progress)
    except ModelNotFoundError as error:
        # The scheduler refuses the draft if its tokenizer is another.
        logger.warning("token ids are taken to be the draft's own, as the target is not here: %s", error)
        return None
    return map_tokens(target, folder)


def target_engine_of(model: PreTrainedModel, settings: EngineSettings, progress: Progress) -> TargetEngine:
    """Of a model in memory, made with `attn_implementation=ATTENTION_NAME`, whose layers are replaced in place.

    The model stays on its device and in its dtype, whatever `settings` say of them, and `settings.model` is but a name.
    Without a tokenizer the vocabulary is as large as the embedding, and rows with a grammar fail. Raises EngineError,
    or ValueError for settings that do not fit: on a GPU they must say what KV gets.
    """
    parts = memory_parts(model)
    return _target_engine(model_in_memory(model, settings, progress), settings, progress, lambda: parts)


def draft_engine_of(model: PreTrainedModel, settings: EngineSettings, progress: Progress) -> DraftEngine:
    """As `target_engine_of`; proposes all tokens of its vocabulary, and grammars are not followed."""
    return _draft_engine(model_in_memory(model, settings, progress), settings, progress)


def _load_head(settings: EngineSettings, target: Path, loaded: LoadedModel, progress: Progress) -> DraftingHead:
    """`target`: its folder. The settings name a head."""
    name = str(settings.draft_head)
    folder = target if name == MTP else fetch_model(resolve_model(name, Role.DRAFT), progress)
    progress(f"loading {name}", None)
    kind = MtpHead if name == MTP else drafter_class(folder)
    return kind(folder, loaded.model, loaded.vocabulary.size, loaded.kernels, settings.ignore_tensors)


def _target_engine(
    loaded: LoadedModel,
    settings: EngineSettings,
    progress: Progress,
    source: Callable[[], dict[str, str]],
    head: DraftingHead | None = None,
) -> TargetEngine:
    """`source` gives the parts of the fingerprint that the loaded model no longer shows."""
    loaded = replace(loaded, windows=_windows(loaded, settings))
    _check_length(loaded, settings)
    weights = _weights_digest(loaded.model)
    replace_layers(loaded, settings.page_size)
    if settings.universal and not loaded.universal:
        raise UnsupportedModelError(
            f"numerics is 'universal', must be 'auto' for {settings.model} here: the same bits on every processor are "
            "computed on CPUs only, of described families without experts (docs/models.md), which ranks cut evenly"
        )
    _make_kernels(loaded, settings, progress)
    exact_row_counts = _exact_row_counts(loaded, settings, progress) if settings.exact else ()
    description, runner, pool = _assemble(loaded, settings, exact_row_counts, head)
    features = None if head is None else Features(loaded.model, head.layers, description.max_num_batched_tokens)
    progress("warming up", None)
    warm_up(description.max_sequence_length, runner, pool, loaded.gpu is None)
    description = capture_graphs(description, runner, pool, progress)
    description = replace(
        description, fingerprint=fingerprint_parts(source(), loaded, runner, settings, exact_row_counts)
    )
    drafting = None
    if head is not None and features is not None:
        passes = head_passes(head, pool, loaded, progress)
        passes.capture(description.graphed_row_counts, description.max_sequence_length, progress)
        drafting = HeadDrafting(head, passes, pool, features, logits_scan(loaded, head.token_ids))
    written = None if drafting is None else drafting.forget_page
    compute_digest = hashlib.sha256(weights + _conditions(loaded, settings, description).encode()).digest()
    kv_store: KvStore = PagedKvStore(runner.kv, settings.model, compute_digest, written)
    if loaded.lead is not None:
        kv_store = LedKvStore(kv_store, loaded.lead)
    return TargetEngine(description, runner, pool, kv_store, logits_scan(loaded), loaded.grammars, drafting)


def _draft_engine(
    loaded: LoadedModel,
    settings: EngineSettings,
    progress: Progress,
    own: torch.Tensor | None = None,
    mapping: TokenMap | None = None,
) -> DraftEngine:
    """`own`: the model's own ids of the tokens that it may propose; None for all."""
    if loaded.solo is not None and not loaded.solo.rewinds:
        raise UnsupportedModelError(f"{loaded.model.config.model_type} cannot draft: its states cannot go back")
    loaded = replace(loaded, windows=_windows(loaded, settings))
    device, token_ids, fed = loaded.model.device, own, None
    if mapping is not None:
        grammars = Grammars(mapping.tokenizer, beside_model=device.type != "cpu")
        loaded = replace(loaded, vocabulary=mapping.vocabulary, grammars=grammars)
        fed, token_ids = torch.tensor(mapping.fed), torch.tensor(mapping.known)
        if own is not None:
            token_ids = token_ids[torch.isin(fed[token_ids], own)]
            if not len(token_ids):
                raise DraftVocabularyError(f"{settings.model} may propose no token that {settings.target} has")
        own, fed = fed[token_ids], fed.to(device)
    if token_ids is not None and own is not None:
        progress(f"drafting with {token_ids.numel()} of {loaded.vocabulary.size} tokens", None)
        token_ids = token_ids.to(device)
        restrict_head(loaded.model, own.to(device))
    replace_layers(loaded, settings.page_size)
    if fed is not None:
        feed_as(loaded.model, fed)
    _make_kernels(loaded, settings, progress)
    description, runner, pool = _assemble(loaded, settings, ())
    progress("warming up", None)
    warm_up(description.max_sequence_length, runner, pool, loaded.gpu is None)
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
    model = fetch_model(resolve_model(settings.model, Role.TARGET), lambda *_: None)
    loaded = read_model(model, replace(settings, device=str(device)), Role.TARGET, lambda *_: None, ranks)
    loaded.replace_layers()
    loaded_all()
    follow(loaded, ranks)


def _gather_ranks(folder: Path, settings: EngineSettings, progress: Progress, other_ranks: OtherRanks) -> Lead:
    size = settings.tensor_parallel_size
    config = read_config(folder)
    check_divides(config, size)
    meeting, broken = other_ranks()
    progress(f"waiting for {size - 1} other ranks", None)
    ranks = join_ranks(meeting, 0, size, torch.device(settings.device))
    return Lead(ranks, broken, sums_as_one(config, size))


def _windows(loaded: LoadedModel, settings: EngineSettings) -> tuple[int | None, ...]:
    """Of the layers."""
    if loaded.solo is not None:
        return ()
    described = windows(loaded.model)
    if described is not None:
        return described
    pool = PagePool(1, settings.page_size)
    return windows_in_pass(loaded.runner(pool, ()), pool)


def _weights_digest(model: PreTrainedModel) -> bytes:
    """Names the weights, by a sample of each tensor."""
    digest = hashlib.sha256()
    for name, weights in sorted(model.state_dict().items()):
        digest.update(name.encode() + weight_sample(weights))
    return digest.digest()


def _conditions(loaded: LoadedModel, settings: EngineSettings, description: EngineDescription) -> str:
    """In exact mode names all but the weights that the bits of KV depend on."""
    if loaded.universal or (settings.exact and loaded.by_cpu_kernels):
        return f"{description.fingerprint} {settings.page_size}"
    key = calibration_key(loaded.model, settings, loaded.kernel_identity)
    key = key if settings.exact else str(settings.tensor_parallel_size)
    return f"{key} {settings.max_model_len}" if has_moving_rope(loaded.model.config) else key


def _check_length(loaded: LoadedModel, settings: EngineSettings) -> None:
    longest = _positions(loaded.model.config)
    if settings.max_model_len is not None and settings.max_model_len > longest:
        raise UnsupportedModelError(
            f"max_model_len is {settings.max_model_len}, must be at most {longest} for {settings.model}"
        )


def _make_kernels(loaded: LoadedModel, settings: EngineSettings, progress: Progress) -> None:
    """Makes those of a GPU for passes of all row counts, several at a time, and finds what else computes the same."""
    if loaded.gpu is None or loaded.lead is not None:
        return
    row_counts = _candidates(loaded, settings)
    pool = PagePool(-(-row_counts[-1] // settings.page_size), settings.page_size)
    with loaded.gpu.made_ahead():
        warm_up(row_counts[-1], loaded.runner(pool, row_counts), pool)
    found = loaded.gpu.use_library(loaded.model, row_counts)
    report(f"torch's library has the bits of own products in {found} shapes and row counts", progress)


def _candidates(loaded: LoadedModel, settings: EngineSettings) -> tuple[int, ...]:
    one_by_one = loaded.solo is not None and loaded.solo.one_by_one
    most = settings.batched_tokens
    return candidate_row_counts(min(most, _ONE_BY_ONE) if one_by_one else most)


def _exact_row_counts(loaded: LoadedModel, settings: EngineSettings, progress: Progress) -> tuple[int, ...]:
    if loaded.solo is not None or loaded.by_cpu_kernels:
        return _candidates(loaded, settings)
    file = calibration_file(loaded.model, settings, loaded.kernel_identity)
    calibration = read_calibration(file)
    if calibration is None:
        progress("calibrating exact mode", None)
        calibration = calibrate(loaded.model, loaded.runner, settings.page_size, settings.batched_tokens)
        write_calibration(file, calibration)
    report(f"exact mode: {calibration.summary()}", progress)
    return calibration.row_counts


def _assemble(
    loaded: LoadedModel, settings: EngineSettings, exact_row_counts: tuple[int, ...], head: DraftingHead | None = None
) -> tuple[EngineDescription, ModelRunner, PagePool]:
    model, vocabulary = loaded.model, loaded.vocabulary
    longest, shape = _positions(loaded.model.config), loaded.kv_shape
    longest = min(longest, settings.max_model_len or longest)
    # A drafting head has its KV on the same pages, and sees everything.
    windows = [None if head is not None or (window or longest) >= longest else window for window in loaded.windows]
    groups = page_groups(windows)
    lanes, of_a_layer = lanes_of(groups, shape.layers), shape.bytes_of_layer(loaded.kv_dtype, loaded.quantized_kv)
    page_bytes = lanes * of_a_layer * settings.page_size
    page_bytes += 0 if head is None else head.bytes_per_page(settings.page_size)
    pages, head_bytes = settings.kv_pages, 0 if head is None else head.nbytes + head.bytes_of_passes(MOST_GRAPHED_ROWS)
    if not pages:
        pages = max(1, kv_bytes(settings, loaded.planned_kv_bytes, model.device, head_bytes) // page_bytes)
    pool = PagePool(pages, settings.page_size, groups, loaded.solo is None or loaded.solo.rewinds)
    # Few in any case: libraries keep a kernel, and its memory, for every row count they met.
    row_counts = exact_row_counts or _candidates(loaded, settings)
    runner = loaded.runner(pool, row_counts)
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
        own_draft_id="" if head is None else head.name,
    )
    return description, runner, pool


def _positions(config: PreTrainedConfig) -> int:
    config = config.get_text_config(decoder=True)
    positions = getattr(config, "max_position_embeddings", None) or _UNLIMITED
    return longest_sequence(int(positions), getattr(config, "rope_parameters", None))
