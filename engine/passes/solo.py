"""Passes of one sequence at a time, by transformers' own attention and cache: for models that pages do not suit.

Between passes a cache lies on its sequence's pages, as bytes: what it holds of each position (keys and values, of any
shape) in the first lane, and in the others what its layers carry along (states of recurrent layers), as of the last
position that was written to the page. So a sequence with such states goes on from where it ends, or from a full page.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from spool.engine.attention.backends import AttentionPlan, Span
from spool.engine.errors import UnsupportedModelError, one_line
from spool.engine.kv.paged_kv import PagedKv
from spool.engine.passes.layout import PreparedPass, TokenBatch

_LAYERS = {
    DynamicLayer,
    DynamicSlidingWindowLayer,
    DynamicIndexedLayer,
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
}
_OF_POSITIONS = ("keys", "values", "indexer_keys")
_CARRIED = ("conv_states", "recurrent_states")
# Of what lies on a page, so that it can be viewed in any dtype.
_ALIGNED = 16


@dataclass(frozen=True, slots=True)
class _Part:
    """A tensor of a cache's layer: `shape` and `bytes` of one position, or of all that is carried along. It lies
    `offset` bytes behind the beginning of `half`."""

    layer: int
    name: str
    index: int | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    bytes: int
    half: int
    offset: int

    def get(self, cache: Cache) -> torch.Tensor:
        found = getattr(cache.layers[self.layer], self.name)
        return found if self.index is None else found[self.index]

    def put(self, cache: Cache, tensor: torch.Tensor | None) -> None:
        if self.index is None:
            setattr(cache.layers[self.layer], self.name, tensor)
        else:
            getattr(cache.layers[self.layer], self.name)[self.index] = tensor


class SoloModel:
    """A model with the layout of its caches on pages: `lanes` lanes of one head of `row_bytes` bytes."""

    def __init__(self, model: PreTrainedModel, page_size: int, exact: bool) -> None:
        """If `exact`, every token has a forward pass of its own, so that its bits depend on those before it alone.
        Raises UnsupportedModelError for a model that does not compute with such a cache."""
        self.model = model
        parameters = inspect.signature(model.forward).parameters
        self._takes = parameters.keys()
        self._cache_name = "past_key_values" if "past_key_values" in parameters else "cache_params"
        self._template, self._positions, self._carried = self._layout()
        sizes = [sum(part.bytes for part in self._positions if part.half == half) for half in (0, 1)]
        carried = sum(part.bytes for part in self._carried)
        state = carried + _ALIGNED if carried else 0
        self.first_carried = 1 if self._positions else 0
        self.row_bytes = max(sizes) or _aligned(-(-state // (2 * page_size)))
        self.lanes = self.first_carried + -(-state // (2 * page_size * self.row_bytes))
        self.one_by_one = exact or bool(carried)

    @property
    def rewinds(self) -> bool:
        """Whether a sequence can go on from any of its positions."""
        return not self._carried

    def forward(self, tokens: torch.Tensor, start: int = 0, cache: Cache | None = None) -> torch.Tensor:
        """Logits `[rows, vocabulary]` of the tokens int64 `[rows]` of one sequence from position `start` on. They are
        added to the cache; without one, nothing is kept."""
        end = start + len(tokens)
        given = {
            "input_ids": tokens.unsqueeze(0),
            "use_cache": cache is not None,
            "position_ids": torch.arange(start, end, device=tokens.device).unsqueeze(0),
            "attention_mask": torch.ones(1, end, dtype=torch.int64, device=tokens.device),
        }
        if cache is not None:
            given[self._cache_name] = cache
            if not any(isinstance(layer, CacheLayerMixin) for layer in cache.layers):
                del given["attention_mask"]
        logits: torch.Tensor = self.model(**{name: what for name, what in given.items() if name in self._takes}).logits
        return logits[0]

    def new_cache(self) -> Cache:
        return DynamicCache(config=self.model.config.get_text_config(decoder=True))

    @torch.inference_mode()
    def _layout(self) -> tuple[Cache, list[_Part], list[_Part]]:
        """A cache without its tensors, and of which parts those are, found by feeding two tokens."""
        family = self.model.config.model_type
        try:
            cache = self.new_cache()
            for position in range(2):
                self.forward(torch.zeros(1, dtype=torch.int64, device=self.model.device), position, cache)
        # A model without such a cache fails in ways of its own.
        except Exception as error:
            raise UnsupportedModelError(f"{family} cannot compute with a cache: {one_line(error)}") from error
        if others := {type(layer).__name__ for layer in cache.layers if type(layer) not in _LAYERS}:
            raise UnsupportedModelError(f"{family} has caches of type {', '.join(sorted(others))}, not supported")
        positions: list[_Part] = []
        carried: list[_Part] = []
        filled, end = [0, 0], _ALIGNED
        for number, layer in enumerate(cache.layers):
            for name in _OF_POSITIONS:
                tensor = getattr(layer, name, None)
                if tensor is None or not tensor.numel():
                    continue
                rows = tensor[0].movedim(-2, 0)
                if len(tensor) != 1 or len(rows) != 2:
                    raise UnsupportedModelError(f"{family} keeps {name} {list(tensor.shape)} of two positions")
                half = int(filled[0] > filled[1])
                size = _aligned(rows[0].numel() * tensor.itemsize)
                positions.append(
                    _Part(number, name, None, tuple(rows.shape[1:]), tensor.dtype, size, half, filled[half])
                )
                filled[half] += size
            for name in _CARRIED:
                for index, tensor in getattr(layer, name, {}).items():
                    if tensor is not None:
                        size = _aligned(tensor.nbytes)
                        carried.append(_Part(number, name, index, tuple(tensor.shape), tensor.dtype, size, 0, end))
                        end += size
        if not positions and not carried:
            raise UnsupportedModelError(f"{family} keeps nothing in its cache")
        for part in (*positions, *carried):
            part.put(cache, None)
        return cache, positions, carried

    def cache_of(self, positions: torch.Tensor, state: torch.Tensor | None) -> Cache:
        """The cache of a sequence of one position or more: bytes `[2, positions, row_bytes]`, and what its layers carry
        along."""
        cache = copy.deepcopy(self._template)
        for part in self._positions:
            of_part = positions[part.half, :, part.offset :][:, : _bytes(part)].view(part.dtype)
            tensor = of_part.unflatten(-1, part.shape).movedim(0, -2).unsqueeze(0)
            layer = cache.layers[part.layer]
            if isinstance(layer, DynamicSlidingWindowLayer):
                layer.cumulative_length = positions.shape[1]
                tensor = tensor[..., 1 - layer.sliding_window :, :]
            # Always a tensor of its own: where one lies in memory must not matter.
            part.put(cache, tensor.clone(memory_format=torch.contiguous_format))
        if state is not None:
            for part in self._carried:
                of_part = state[part.offset :][: _bytes(part)].clone().view(part.dtype)
                part.put(cache, of_part.view(part.shape))
        return cache

    def keep(self, cache: Cache, rows: torch.Tensor) -> None:
        """Writes what the cache holds of its last positions to `rows`, bytes `[2, positions, row_bytes]`."""
        for part in self._positions:
            latest = part.get(cache)[0].movedim(-2, 0)[-rows.shape[1] :].flatten(1).contiguous()
            rows[part.half, :, part.offset : part.offset + _bytes(part)] = latest.view(torch.uint8)

    def state_of(self, cache: Cache, position: int) -> torch.Tensor:
        """Bytes: the position, and what the layers carry along after it."""
        parts = [torch.tensor([position, 0], device=self.model.device).view(torch.uint8)]
        for part in self._carried:
            own = part.get(cache).reshape(-1).view(torch.uint8)
            parts.append(torch.nn.functional.pad(own, (0, part.bytes - len(own))))
        return torch.cat(parts)


class SoloBackend:
    """In the place of a backend: the model attends by itself."""

    def plan(self, spans: Sequence[Span], batched_tokens: int) -> AttentionPlan:
        raise NotImplementedError


class SoloPasses:
    """Takes the place of `EagerPasses`."""

    def __init__(self, solo: SoloModel, kv: PagedKv) -> None:
        self._solo = solo
        self._kv = kv
        self._rows = kv.layers[0]
        self._lanes = kv.layers[solo.first_carried :]

    def prepare(self, batch: TokenBatch) -> PreparedPass:
        return PreparedPass(lambda: self._compute(batch), 0.0)

    def _compute(self, batch: TokenBatch) -> torch.Tensor:
        device = self._solo.model.device
        tokens = torch.tensor(batch.tokens, device=device)
        if batch.fed is not None:
            tokens[: len(batch.fed)].copy_(batch.fed)
        wanted = set(batch.logits_rows)
        found: dict[int, torch.Tensor] = {}
        for span in batch.spans[0]:
            slots = torch.tensor(batch.slots[0][span.first_row : span.first_row + span.rows], device=device)
            for first, logits in self._feed(span, tokens[span.first_row : span.first_row + span.rows], slots):
                rows = range(span.first_row + first, span.first_row + first + len(logits))
                found |= {row: logits[row - rows.start] for row in rows if row in wanted}
                none = logits[:0]
        return torch.stack([found[row] for row in batch.logits_rows]) if batch.logits_rows else none

    def _feed(self, span: Span, tokens: torch.Tensor, slots: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Gives logits, each time with which token's they are first."""
        solo, size, start = self._solo, self._kv.page_size, span.start
        cache = self._stored(span) if start else solo.new_cache()
        rows = torch.zeros(2, span.rows, solo.row_bytes, dtype=torch.uint8, device=tokens.device)
        step = 1 if solo.one_by_one else span.rows
        for layer in cache.layers:
            if step > 1 and isinstance(layer, DynamicSlidingWindowLayer):
                layer.activate_past_recording()
        for first in range(0, span.rows, step):
            yield first, solo.forward(tokens[first : first + step], start + first, cache)
            solo.keep(cache, rows[:, first : first + step])
            end = start + first + step
            if not solo.rewinds and (end % size == 0 or end == start + span.rows):
                self._write_state(span.pages[(end - 1) // size], solo.state_of(cache, end - 1))
        if solo.first_carried:
            self._rows.write(slots, *rows)

    def _stored(self, span: Span) -> Cache:
        size, last = self._kv.page_size, span.start - 1
        count = last // size + 1 if self._solo.first_carried else 0
        pages = torch.tensor(span.pages[:count], dtype=torch.int64, device=self._rows.pool.device)
        positions = self._rows.pool.index_select(1, pages).flatten(1, 3)[:, : span.start]
        if self._solo.rewinds:
            return self._solo.cache_of(positions, None)
        page = span.pages[last // size]
        state = torch.cat([lane.pool[:, page].flatten() for lane in self._lanes])
        if (found := int(state[:8].view(torch.int64))) != last:
            raise RuntimeError(f"page {page} has the states after position {found}, must be after {last}")
        return self._solo.cache_of(positions, state)

    def _write_state(self, page: int, state: torch.Tensor) -> None:
        for lane in self._lanes:
            place = lane.pool[:, page]
            part, state = state[: place.numel()], state[place.numel() :]
            place.copy_(torch.nn.functional.pad(part, (0, place.numel() - len(part))).view(place.shape))


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def _bytes(part: _Part) -> int:
    """Without what fills it up."""
    count = part.dtype.itemsize
    for size in part.shape:
        count *= size
    return count
