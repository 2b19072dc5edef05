"""A model read from its folder, or taken as it is in memory: configuration, weights, vocabulary."""

from __future__ import annotations

import logging
from pathlib import Path
from pickle import UnpicklingError

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from spool.engine.attention.paged_step import ATTENTION_NAME
from spool.engine.cpu.kernels import CpuKernels
from spool.engine.errors import UnsupportedModelError, one_line
from spool.engine.kv.memory import planned_kv_bytes
from spool.engine.models.compatibility import check_config, fix_frequencies
from spool.engine.models.dtype import AUTO, COMPUTED, best_dtype, converted, dtype_name
from spool.engine.models.families import DENSE_FAMILIES, SOLO_FAMILIES, SPARSE_FAMILIES
from spool.engine.models.kernels import cpu_kernels, gpu_passes, takes_codes
from spool.engine.models.loaded_model import LoadedModel
from spool.engine.models.reference import own_attention
from spool.engine.models.source import Progress
from spool.engine.models.vocabulary import Vocabulary, read_tokenizer, vocabulary_of
from spool.engine.models.weights import check_loaded, pickled_tensors, safetensors_files, stored_tensors
from spool.engine.parallel.ranks import Ranks
from spool.engine.parallel.shards import read_part
from spool.engine.passes.solo import SoloModel
from spool.engine.quantization.gguf_file import GgufFile
from spool.engine.quantization.model import (
    build_model,
    is_quantized,
    moved,
    open_weights,
    round_weights,
    stored_quantization,
)
from spool.engine.quantization.sizes import NOT_QUANTIZED, ROUNDED_BITS, stated_quantization
from spool.engine.sampling.grammars import Grammars
from spool.engine.settings import EngineSettings
from spool.scheduler.messages import Role

logger = logging.getLogger(__name__)

# What transformers raises for fields that do not fit, files that are damaged, and types that it does not know or that
# come with code of their own.
_UNREADABLE = (
    *(OSError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError, AssertionError),
    *(ImportError, RuntimeError, EOFError, UnpicklingError, StrictDataclassError),
)


def read_model(
    folder: Path, settings: EngineSettings, role: Role, progress: Progress, ranks: Ranks | None = None
) -> LoadedModel:
    """The model in `folder`; with `ranks`, this rank's part of it. Raises `EngineError`."""
    if settings.threads:
        torch.set_num_threads(settings.threads)
    progress(f"loading {settings.model}", None)
    disable_progress_bar()
    device = torch.device(settings.device)
    kv_bytes = planned_kv_bytes(settings, role, folder, device)
    config, source = read_config(folder), open_weights(folder)
    quantization = stored_quantization(source, config)
    if quantization == NOT_QUANTIZED:
        model = _read_plain(folder, config, settings, ranks)
        rounded = settings.quantization in ROUNDED_BITS
        dtype, kernels = _dtype_and_kernels(model.dtype, device, settings, progress, rounded)
        if dtype != model.dtype:
            converted(model, dtype)
        quantization = _round(model, device, settings, progress)
    else:
        model, kernels = _read_quantized(source, config, quantization, device, settings, ranks, progress)
        quantization = quantization if is_quantized(model) else NOT_QUANTIZED
    if kernels is not None:
        report(f"CPU kernels for {kernels.isa}", progress)
    model = moved(model, device).eval()
    fix_frequencies(model, settings.max_model_len)
    solo = _solo(model, quantization, settings) if config.model_type in SOLO_FAMILIES else None
    gpu = None if solo else gpu_passes(model, settings, settings.cuda_graphs and ranks is None, progress)
    tokenizer = read_tokenizer(folder)
    vocabulary = vocabulary_of(tokenizer, folder, model.get_input_embeddings().num_embeddings)
    leads = ranks is None or ranks.rank == 0
    grammars = Grammars(tokenizer, beside_model=device.type != "cpu") if tokenizer is not None and leads else None
    quantized_kv = settings.quantized_kv
    return LoadedModel(
        model,
        vocabulary,
        kernels,
        gpu,
        kv_bytes,
        grammars,
        quantization=quantization,
        quantized_kv=quantized_kv,
        solo=solo,
    )


def model_in_memory(model: PreTrainedModel, settings: EngineSettings, progress: Progress) -> LoadedModel:
    """`model` where and in the dtype that it is. Raises EngineError, or ValueError for settings that do not fit."""
    if model.config._attn_implementation != ATTENTION_NAME:
        raise ValueError(f"attn_implementation is {model.config._attn_implementation!r}, must be {ATTENTION_NAME!r}")
    if settings.tensor_parallel_size != 1:
        raise ValueError(f"tensor_parallel_size is {settings.tensor_parallel_size}, must be 1 for a model in memory")
    if model.device.type == "cuda" and settings.kv_pages is None and settings.kv_memory_bytes is None:
        raise ValueError("kv_pages and kv_memory_bytes are None, one must be set for a model in a GPU's memory")
    check_config(model.config)
    if model.config.model_type in SOLO_FAMILIES:
        raise UnsupportedModelError(f"{model.config.model_type} must be loaded from a folder")
    if settings.threads:
        torch.set_num_threads(settings.threads)
    model.eval()
    fix_frequencies(model, settings.max_model_len)
    kernels = cpu_kernels(model.dtype, model.device, settings, progress, settings.quantization in ROUNDED_BITS)
    vocabulary = Vocabulary(b"", model.get_input_embeddings().num_embeddings)
    quantization = _round(model, model.device, settings, progress)
    gpu = gpu_passes(model, settings, settings.cuda_graphs, progress)
    quantized_kv = settings.quantized_kv
    return LoadedModel(model, vocabulary, kernels, gpu, quantization=quantization, quantized_kv=quantized_kv)


def report(message: str, progress: Progress) -> None:
    progress(message, None)
    logger.info("%s", message)


def read_config(folder: Path) -> PreTrainedConfig:
    try:
        config = AutoConfig.from_pretrained(folder)
        if quantization := stated_quantization(folder, config.to_dict()):
            config.quantization_config = quantization
        check_config(config)
    except _UNREADABLE as error:
        raise _cannot_load(folder, error) from error
    return config


def _read_plain(
    folder: Path, config: PreTrainedConfig, settings: EngineSettings, ranks: Ranks | None
) -> PreTrainedModel:
    dtype = settings.dtype
    try:
        if ranks is not None:
            return read_part(folder, config, dtype, ranks, settings.ignore_tensors)
        files = safetensors_files(folder)
        stored = stored_tensors(files) if files else pickled_tensors(folder)
        solo = config.model_type in SOLO_FAMILIES
        model, report = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            attn_implementation=own_attention(config) if solo else ATTENTION_NAME,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    except _UNREADABLE as error:
        if error.args == (ATTENTION_NAME,):
            raise UnsupportedModelError("the model does not use transformers' attention interface") from error
        raise _cannot_load(folder, error) from error
    check_loaded(folder, model, report, stored, settings.ignore_tensors)
    return model


def _cannot_load(folder: Path, error: Exception) -> UnsupportedModelError:
    return UnsupportedModelError(f"transformers cannot load {folder.name}: {one_line(error)}")


def _dtype_and_kernels(
    stored: torch.dtype, device: torch.device, settings: EngineSettings, progress: Progress, quantized: bool
) -> tuple[torch.dtype, CpuKernels | None]:
    """What a model is computed in whose weights are in `stored`, and the CPU kernels for it."""
    dtype = stored
    if settings.dtype == AUTO:
        dtype, reason = best_dtype(stored, device)
        report(f"dtype {dtype_name(dtype)}: {reason}", progress)
    return dtype, cpu_kernels(dtype, device, settings, progress, quantized)


def _read_quantized(
    source: GgufFile | Path,
    config: PreTrainedConfig,
    quantization: str,
    device: torch.device,
    settings: EngineSettings,
    ranks: Ranks | None,
    progress: Progress,
) -> tuple[PreTrainedModel, CpuKernels | None]:
    """Weights are expanded where no kernel takes them quantised, or the settings say so."""
    path = source.path if isinstance(source, GgufFile) else source
    if settings.quantization in ROUNDED_BITS:
        raise UnsupportedModelError(
            f"quantization is {settings.quantization!r}, must be auto or none: "
            f"{path.name} is quantised already ({quantization})"
        )
    own = config.dtype if config.dtype in COMPUTED else torch.bfloat16
    asked = own if settings.dtype == AUTO else getattr(torch, settings.dtype)
    known = settings.quantization == AUTO and config.model_type in DENSE_FAMILIES
    dtype, kernels = _dtype_and_kernels(asked, device, settings, progress, quantized=known)
    keep = known and takes_codes(dtype, device)
    try:
        model = build_model(source, config, dtype, keep, ranks, settings.ignore_tensors)
    except _UNREADABLE as error:
        raise _cannot_load(path, error) from error
    if is_quantized(model):
        report(f"weights: {quantization}", progress)
        return model, kernels
    size = sum(weights.nbytes for weights in model.parameters()) >> 20
    reason = "no kernel here multiplies what is stored"
    if settings.quantization != AUTO:
        reason = "quantization is 'none'"
    elif config.model_type not in DENSE_FAMILIES:
        reason = f"{config.model_type} is none of the families whose weights stay as they are (docs/models.md)"
    report(f"weights: {quantization}, expanded to {dtype_name(dtype)}, {size} MiB: {reason}", progress)
    return model, kernels


def _solo(model: PreTrainedModel, quantization: str, settings: EngineSettings) -> SoloModel:
    family = model.config.model_type
    if quantization != NOT_QUANTIZED:
        raise UnsupportedModelError(f"{family} has {quantization} weights, which are not supported for this family")
    if settings.quantized_kv:
        raise UnsupportedModelError(f"kv_cache_dtype is {settings.kv_cache_dtype!r}, must be auto for {family}")
    if settings.draft_head is not None:
        raise UnsupportedModelError(f"draft_head is {settings.draft_head}, must be None for {family}")
    return SoloModel(model, settings.page_size, settings.exact)


def _round(
    model: PreTrainedModel,
    device: torch.device,
    settings: EngineSettings,
    progress: Progress,
) -> str:
    """Rounds the weights of a plain model where the settings say so; gives the name of its quantisation."""
    bits = ROUNDED_BITS.get(settings.quantization)
    if bits is None:
        return NOT_QUANTIZED
    if model.config.model_type not in DENSE_FAMILIES | SPARSE_FAMILIES or not takes_codes(model.dtype, device):
        report(f"weights stay as they are: no kernel takes {settings.quantization} here", progress)
        return NOT_QUANTIZED
    progress(f"rounding weights to {bits} bits", None)
    round_weights(model, bits)
    report(f"weights: {settings.quantization}", progress)
    return settings.quantization
