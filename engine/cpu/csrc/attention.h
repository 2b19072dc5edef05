// What the ways to attend share.

#pragma once

#include "kernels.h"
#include "pages.h"

// Runs of LANES positions from one whose keys are computed with to the one whose keys are asked for meanwhile.
#define AHEAD 2
// Runs whose scores are computed at once: the chains of one would wait for each other.
#define RUNS 2

// Of a call: queries and outputs [rows, query_heads, head_dim], the pages listed, and the floats from the scores of one
// query to those of the next.
typedef struct {
    element *to;
    const element *queries;
    void *pool;
    const int64_t *pages;
    Rule rule;
    ptrdiff_t stride;
    Heads heads;
} Attention;

// How many query heads share a KV head.
INLINE ptrdiff_t group_of(const Attention *call) { return call->heads.query_heads / call->heads.kv_heads; }

// The first position that the row at `position` sees.
INLINE ptrdiff_t first_seen(const Attention *call, ptrdiff_t position) {
    return call->rule.window && position >= call->rule.window ? position + 1 - call->rule.window : 0;
}

// Where a row's query heads of a KV head are, in queries and in outputs.
INLINE ptrdiff_t place_of(const Attention *call, ptrdiff_t row, ptrdiff_t kv_head) {
    return (row * call->heads.query_heads + kv_head * group_of(call)) * call->heads.head_dim;
}

// Factors of a query or a key.
INLINE ptrdiff_t factors_of(const Attention *call) { return call->heads.head_dim / FACTOR_ELEMENTS; }

// Queries of a block to [rows * group, factors_of].
INLINE void gather_queries(factor *to, const Attention *call, const Block *block, ptrdiff_t kv_head) {
    ptrdiff_t size = group_of(call) * factors_of(call);
    for (ptrdiff_t row = 0; row < block->rows; row++, to += size) {
        const element *from = call->queries + place_of(call, block->first_row + row, kv_head);
        for (ptrdiff_t i = 0; i < size; i += LANES) {
            factors some = load_factors(from + i * FACTOR_ELEMENTS);
            memcpy(to + i, &some, sizeof some);
        }
    }
}

// What the page of `position` holds of keys (values: 0) or values (1).
INLINE const char *kv_page(
    const Attention *call, const Block *block, ptrdiff_t values, ptrdiff_t position, ptrdiff_t kv_head) {
    assert(position >= 0 && position < block->start + block->rows + LANES);
    ptrdiff_t page = call->pages[block->first_page + position / call->heads.page_size];
    return page_of(call->pool, &call->heads, values, page, kv_head);
}

// Keys or values of LANES positions from `position` on, a multiple of LANES: elements or codes.
INLINE const char *kv_at(
    const Attention *call, const Block *block, ptrdiff_t values, ptrdiff_t position, ptrdiff_t kv_head) {
    return kv_page(call, block, values, position, kv_head) +
           position % call->heads.page_size * row_bytes(&call->heads);
}

// Their scales, to `to`.
INLINE void take_scales(float *to, const Attention *call, const Block *block, ptrdiff_t values, ptrdiff_t position,
    ptrdiff_t kv_head) {
    const char *from = kv_page(call, block, values, position, kv_head) + call->heads.page_size * row_bytes(&call->heads);
    memcpy(to, from + position % call->heads.page_size * sizeof *to, LANES * sizeof *to);
}

// Of keys or values, numbers that are loaded or fetched as elements or as codes.
INLINE f32v load_stored(const char *from, ptrdiff_t at, const Heads *heads) {
    return heads->quantized ? load_codes(from + at) : load_element((const element *)from + at);
}

INLINE factors load_stored_factors(const char *from, ptrdiff_t at, const Heads *heads) {
    return heads->quantized ? load_code_factors(from + at) : load_factors((const element *)from + at);
}

#ifdef PAIRED

// Swaps the off-diagonal blocks of `step` lanes in a pair of rows: one stage of a transposition.
#define SWAP_BLOCKS(step)                                                                                              \
    for (int i = 0; i < LANES; i++)                                                                                    \
        if (!(i & step)) {                                                                                             \
            u32v low = rows[i], high = rows[i + step];                                                                 \
            i32v upper = (lane & step) != 0;                                                                           \
            rows[i] = shuffle(low, high, (u32v)(lane + (upper & (LANES - step))));                           \
            rows[i + step] = shuffle(low, high, (u32v)(lane + (upper & LANES) + (~upper & step)));           \
        }

// Keys [LANES, head_dim] to factors [head_dim / FACTOR_ELEMENTS, LANES], so that scores are sums of whole vectors.
INLINE void arrange_keys(factors *to, const char *keys, const Heads *heads) {
    ptrdiff_t head_dim = heads->head_dim;
    i32v lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    for (ptrdiff_t first = 0; first < head_dim; first += FACTOR_ELEMENTS * LANES) {
        u32v rows[LANES];
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) rows[i] = (u32v)load_stored_factors(keys, i * head_dim + first, heads);
#if LANES > 8
#pragma GCC unroll 16
        SWAP_BLOCKS(8)
#endif
#if LANES > 4
#pragma GCC unroll 16
        SWAP_BLOCKS(4)
#endif
#pragma GCC unroll 16
        SWAP_BLOCKS(2)
#pragma GCC unroll 16
        SWAP_BLOCKS(1)
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) to[first / FACTOR_ELEMENTS + i] = (factors)rows[i];
    }
}

#else

// Keys [LANES, head_dim] to factors of the same order: without products of pairs, a transposition costs more than sums
// within vectors do.
INLINE void arrange_keys(factors *to, const char *keys, const Heads *heads) {
    for (ptrdiff_t i = 0; i < LANES * heads->head_dim; i += LANES) *to++ = load_stored_factors(keys, i, heads);
}

#endif

// What comes next lies on another page, which no hardware foresees.
INLINE void fetch_ahead(const char *from, ptrdiff_t bytes) {
    for (ptrdiff_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + i);
}

// Keys of up to RUNS runs from `position` on, as far as the block sees, arranged, to factors [runs, head_dim /
// FACTOR_ELEMENTS, LANES]. Gives how many runs there are.
INLINE int take_keys(factors *to, const Attention *call, const Block *block, ptrdiff_t kv_head, ptrdiff_t position) {
    ptrdiff_t bytes = LANES * row_bytes(&call->heads), last = block->start + block->rows;
    int runs = last - position > LANES ? RUNS : 1;
    for (int run = 0; run < runs; run++) {
        ptrdiff_t here = position + run * LANES, ahead = here + AHEAD * LANES;
        if (ahead < last) fetch_ahead(kv_at(call, block, 0, ahead, kv_head), bytes);
        // Values come while there is something to compute: their turn has little of that.
        fetch_ahead(kv_at(call, block, 1, here, kv_head), bytes);
        arrange_keys(to + run * factors_of(call), kv_at(call, block, 0, here, kv_head), &call->heads);
    }
    return runs;
}

// Of the products of a query and keys: the shares of what the row at `position` sees, and zeros for the rest of these
// runs. Other runs would add nothing to the sums.
INLINE void softmax(float *scores, const Attention *call, ptrdiff_t position, ptrdiff_t query_head) {
    ptrdiff_t first = first_seen(call, position), seen = position + 1;
    ptrdiff_t begin = first / LANES * LANES, whole = (seen + LANES - 1) / LANES * LANES;
    float scaling = call->rule.scaling, cap = call->rule.cap;
    if (cap > 0.0f) {
        for (ptrdiff_t i = begin; i < whole; i += LANES)
            store(scores + i, splat(cap) * hyperbolic_tangent(load(scores + i) * splat(scaling / cap)));
        scaling = 1.0f;
    }
    for (ptrdiff_t i = begin; i < first; i++) scores[i] = -INFINITY;
    for (ptrdiff_t i = seen; i < whole; i++) scores[i] = -INFINITY;
    f32v maxima = load(scores + begin);
    for (ptrdiff_t i = begin + LANES; i < whole; i += LANES) {
        f32v x = load(scores + i);
        maxima = blend(maxima < x, x, maxima);
    }
    float highest = largest(maxima) * scaling, sink = call->rule.sinks ? call->rule.sinks[query_head] : -INFINITY;
    if (highest < sink) highest = sink;
    // A position's lane is that of its number, wherever the first one is.
    f32v total[PARTS] = {};
    for (ptrdiff_t i = begin; i < whole; i += LANES) {
        f32v x = exponential(multiply_add(load(scores + i), splat(scaling), splat(-highest)));
        store(scores + i, x);
        total[i / LANES % PARTS] += x;
    }
    float share = 1.0f / (sum(total) + exponential(splat(sink - highest))[0]);
    for (ptrdiff_t i = begin; i < whole; i += LANES) store(scores + i, load(scores + i) * share);
}

// Weighted sums of values from position `from` on, or of all that the row sees where that is 0, for `count` queries that
// see the same positions and `parts` times LANES dimensions from `first` on. Each is one chain of sums in the order of
// positions that continues `begun`.
INLINE void sum_values(int count, int parts, element *to, const float *weights, const float *begun, ptrdiff_t from,
    ptrdiff_t seen, const Attention *call, const Block *block, ptrdiff_t kv_head, ptrdiff_t first) {
    ptrdiff_t head_dim = call->heads.head_dim;
    f32v sums[VALUE_QUERIES][4]; // no set has more VALUE_VECTORS
#pragma GCC unroll 4
    for (int query = 0; query < count; query++)
#pragma GCC unroll 4
        for (int part = 0; part < parts; part++)
            sums[query][part] = from ? load(begun + query * head_dim + first + part * LANES) : splat(0.0f);
    ptrdiff_t begin = from ? from : first_seen(call, seen - 1);
    for (ptrdiff_t run = begin / LANES * LANES; run < seen; run += LANES) {
        ptrdiff_t position = run < begin ? begin : run, end = seen - run < LANES ? seen : run + LANES;
        const char *values = kv_at(call, block, 1, run, kv_head);
        for (ptrdiff_t at = (position - run) * head_dim + first; position < end; position++, at += head_dim) {
#pragma GCC unroll 4
            for (int part = 0; part < parts; part++) {
                f32v value = load_stored(values, at + part * LANES, &call->heads);
#pragma GCC unroll 4
                for (int query = 0; query < count; query++)
                    sums[query][part] =
                        multiply_add(value, splat(weights[query * call->stride + position]), sums[query][part]);
            }
        }
    }
#pragma GCC unroll 4
    for (int query = 0; query < count; query++)
#pragma GCC unroll 4
        for (int part = 0; part < parts; part++)
            store_element(to + query * head_dim + first + part * LANES, sums[query][part]);
}

// The same for all dimensions of up to VALUE_QUERIES queries.
INLINE void sum_query_values(int count, element *to, const float *weights, const float *begun, ptrdiff_t from,
    ptrdiff_t seen, const Attention *call, const Block *block, ptrdiff_t kv_head) {
    ptrdiff_t first = 0;
    for (; first + VALUE_VECTORS(count) * LANES <= call->heads.head_dim; first += VALUE_VECTORS(count) * LANES)
        sum_values(count, VALUE_VECTORS(count), to, weights, begun, from, seen, call, block, kv_head, first);
    for (; first < call->heads.head_dim; first += 2 * LANES)
        sum_values(count, 2, to, weights, begun, from, seen, call, block, kv_head, first);
}

// The same for all queries of a row, which have `weights` [group, stride] and the sums `begun` [group, head_dim] of the
// positions before `from`.
INLINE void sum_row_values(const Attention *call, const Block *block, ptrdiff_t kv_head, ptrdiff_t row,
    const float *weights, const float *begun, ptrdiff_t from) {
    ptrdiff_t group = group_of(call), head_dim = call->heads.head_dim, seen = block->start + row + 1;
    element *to = call->to + place_of(call, block->first_row + row, kv_head);
    for (; group > 0; group -= VALUE_QUERIES) {
        switch (group) {
        case 1: sum_query_values(1, to, weights, begun, from, seen, call, block, kv_head); break;
        case 2: sum_query_values(2, to, weights, begun, from, seen, call, block, kv_head); break;
        case 3: sum_query_values(3, to, weights, begun, from, seen, call, block, kv_head); break;
        default: sum_query_values(4, to, weights, begun, from, seen, call, block, kv_head);
        }
        to += VALUE_QUERIES * head_dim, weights += VALUE_QUERIES * call->stride, begun += VALUE_QUERIES * head_dim;
    }
}

#ifdef HAS_TILES
// In attention_amx.c.
size_t tile_scratch_bytes(const Attention *call, ptrdiff_t count);
void tile_attend_block(const Attention *call, const Block *block, ptrdiff_t kv_head, void *scratch);
#endif
