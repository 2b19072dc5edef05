"""Tensors of model files that nothing takes: which change nothing, which the settings leave out, and the refusal of all
others. Knows no torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from spool.engine.errors import UnsupportedModelError

WAY_OUT = "without, the text may be wrong (models.ignore_tensors, or --ignore-tensors, names what may be left out)"

_NAMED = 3
"""Tensors that an error names at most."""

_CHANGE_NOTHING = re.compile(
    "|".join(
        (
            # Computed anew: frequencies of rotary positions, masks, and numbers of positions.
            r"(^|\.)(inv_freq|original_inv_freq|cos_cached|sin_cached)$",
            r"(^|\.)(attn|attention|attn\.attention)\.(bias|masked_bias|causal_mask)$",
            r"(^|\.)(position_ids|num_batches_tracked)$",
            # Of KV, which Spool does not quantise as a checkpoint says.
            r"\.(k_proj|v_proj|self_attn|attn)\.[kv]_scale$",
            # Versions of formats.
            r"(^|\.)(encoder|decoder)\.version$",
            # Towers for images and sound, heads for sentences, and values of tokens: beside the text.
            r"^(model\.)?(visual|vision_tower|vision_model|multi_modal_projector|audio_tower|embed_vision|embed_audio)\.",
            r"(^|\.)pooler\.|^cls\.seq_relationship\.|^v_head\.",
        )
    )
)
"""Names of tensors that published checkpoints hold and that change no token where a model has no place for them.
`_keys_to_ignore_on_load_unexpected` of transformers' classes has those of single families."""


def changes_nothing(name: str) -> bool:
    """Whether a tensor of this name that a model has no place for changes no token."""
    return _CHANGE_NOTHING.search(name) is not None


def is_ignored(name: str, ignored: Sequence[str]) -> bool:
    """Whether `name`, of a tensor or key, is one of `ignored`: names or patterns as in a shell
    (`EngineSettings.ignore_tensors`)."""
    return any(fnmatchcase(name, pattern) for pattern in ignored)


def refuse_unused(holder: str, names: Iterable[str], ignored: Sequence[str]) -> None:
    """Raises UnsupportedModelError that names the tensors of `holder`, a file or folder, which nothing takes, but those
    that `is_ignored` finds."""
    refused = [name for name in names if not is_ignored(name, ignored)]
    if refused:
        raise UnsupportedModelError(
            f"{holder} holds {listed(refused)}, which its configuration has no place for: {WAY_OUT}"
        )


def listed(names: Iterable[str]) -> str:
    """The first of them, and how many more there are."""
    ordered = sorted(names)
    more = f" and {len(ordered) - _NAMED} more" if len(ordered) > _NAMED else ""
    return ", ".join(ordered[:_NAMED]) + more
