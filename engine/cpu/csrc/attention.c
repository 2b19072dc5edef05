// Causal attention over KV pages where they lie.

#include "amx.h"
#include "attention.h"

#ifdef PAIRED

// Scores of `count` queries [row_factors] over `runs` times LANES keys [row_factors, LANES], each one chain of sums in
// the order of dimensions.
INLINE void score_block(int count, int runs, float *scores, ptrdiff_t stride, const factor *queries,
    const factors *keys, ptrdiff_t row_factors) {
    f32v sums[6][RUNS];
#pragma GCC unroll 6
    for (int query = 0; query < count; query++)
#pragma GCC unroll 2
        for (int run = 0; run < runs; run++) sums[query][run] = splat(0.0f);
    for (ptrdiff_t i = 0; i < row_factors; i++)
#pragma GCC unroll 6
        for (int query = 0; query < count; query++)
#pragma GCC unroll 2
            for (int run = 0; run < runs; run++)
                sums[query][run] =
                    add_products(sums[query][run], keys[run * row_factors + i], queries[query * row_factors + i]);
#pragma GCC unroll 6
    for (int query = 0; query < count; query++)
#pragma GCC unroll 2
        for (int run = 0; run < runs; run++) store(scores + query * stride + run * LANES, sums[query][run]);
}

// The same for any number of queries.
INLINE void score_queries(int runs, float *scores, ptrdiff_t stride, const factor *queries, ptrdiff_t count,
    const factors *keys, ptrdiff_t row_factors) {
    ptrdiff_t query = 0;
    for (; query + 6 <= count; query += 6)
        score_block(6, runs, scores + query * stride, stride, queries + query * row_factors, keys, row_factors);
    for (; query + 3 <= count; query += 3)
        score_block(3, runs, scores + query * stride, stride, queries + query * row_factors, keys, row_factors);
    for (; query < count; query++)
        score_block(1, runs, scores + query * stride, stride, queries + query * row_factors, keys, row_factors);
}

#else

// Keys whose sums stay in registers together.
#define SCORE_KEYS (LANES == 16 ? 16 : 4)

// Scores of `count` queries [row_factors] over `runs` times LANES keys [LANES, row_factors]. Of each, every one of
// SUM_LANES lanes is one chain of sums in the order of dimensions; lanes are added up in pairs.
INLINE void score_queries(int runs, float *scores, ptrdiff_t stride, const factor *queries, ptrdiff_t count,
    const factors *keys, ptrdiff_t row_factors) {
    ptrdiff_t vectors = row_factors / LANES;
    for (int run = 0; run < runs; run++, keys += row_factors)
        for (ptrdiff_t query = 0; query < count; query++) {
            f32v sums[LANES];
#pragma GCC unroll 4
            for (int begin = 0; begin < LANES; begin += SCORE_KEYS) {
                f32v chains[SCORE_KEYS][PARTS] = {};
                for (ptrdiff_t i = 0; i < vectors; i += PARTS)
#pragma GCC unroll 4
                    for (int part = 0; part < PARTS; part++) {
                        f32v by = load(queries + query * row_factors + (i + part) * LANES);
#pragma GCC unroll 16
                        for (int key = 0; key < SCORE_KEYS; key++)
                            chains[key][part] =
                                multiply_add(keys[(begin + key) * vectors + i + part], by, chains[key][part]);
                    }
#pragma GCC unroll 16
                for (int key = 0; key < SCORE_KEYS; key++) sums[begin + key] = sum_parts(chains[key]);
            }
            REDUCE_ROWS(sums, first + second);
            store(scores + query * stride + run * LANES, sums[0]);
        }
}

#endif

// Scores of a query, in whole runs.
static ptrdiff_t stride_of(ptrdiff_t longest) {
    ptrdiff_t together = RUNS * LANES;
    return (longest + together - 1) / together * together;
}

// Bytes of scratch that a block of up to `count` queries needs.
static size_t scratch_bytes(const Attention *call, ptrdiff_t count) {
    ptrdiff_t row_factors = factors_of(call);
    return RUNS * row_factors * sizeof(factors) + (count + 2) * call->stride * sizeof(float) +
           count * row_factors * sizeof(factor);
}

// Of what a query has for its positions and their scales: the products of [begin, end), in whole runs.
INLINE void scale(float *to, const float *scales, ptrdiff_t begin, ptrdiff_t end) {
    for (ptrdiff_t i = begin / LANES * LANES; i < end; i += LANES) store(to + i, load(to + i) * load(scales + i));
}

// Attention of one KV head's queries in a block. Scratch: RUNS runs of keys [row_factors, LANES], scores
// [rows * group, stride], scales of keys and of values [stride], queries [rows * group, row_factors]. Codes are multiplied
// as they are; scales multiply a key's scores, and the weights of a value.
INLINE void attend_block(const Attention *call, const Block *block, ptrdiff_t kv_head, void *scratch) {
    ptrdiff_t row_factors = factors_of(call), stride = call->stride, group = group_of(call);
    ptrdiff_t count = block->rows * group, last = block->start + block->rows;
    factors *keys = scratch;
    float *scores = (float *)(keys + RUNS * row_factors);
    float *key_scales = scores + count * stride, *value_scales = key_scales + stride;
    factor *queries = (factor *)(value_scales + stride);
    gather_queries(queries, call, block, kv_head);
    ptrdiff_t begin = first_seen(call, block->start) / (RUNS * LANES) * (RUNS * LANES);
    for (ptrdiff_t position = begin; position < last; position += RUNS * LANES) {
        int runs = take_keys(keys, call, block, kv_head, position);
        if (call->heads.quantized)
            for (ptrdiff_t run = position; run < position + runs * LANES; run += LANES) {
                take_scales(key_scales + run, call, block, 0, run, kv_head);
                take_scales(value_scales + run, call, block, 1, run, kv_head);
            }
        ptrdiff_t first = position > block->start ? (position - block->start) * group : 0;
        float *to = scores + first * stride + position;
        if (runs == RUNS)
            score_queries(RUNS, to, stride, queries + first * row_factors, count - first, keys, row_factors);
        else
            score_queries(1, to, stride, queries + first * row_factors, count - first, keys, row_factors);
    }
    for (ptrdiff_t row = 0; row < block->rows; row++) {
        float *weights = scores + row * group * stride;
        ptrdiff_t position = block->start + row, seen_from = first_seen(call, position);
        for (ptrdiff_t query = 0; query < group; query++) {
            if (call->heads.quantized) scale(weights + query * stride, key_scales, seen_from, position + 1);
            softmax(weights + query * stride, call, position, kv_head * group + query);
            if (call->heads.quantized) scale(weights + query * stride, value_scales, seen_from, position + 1);
        }
        sum_row_values(call, block, kv_head, row, weights, weights, 0);
    }
}

// Two functions, so that the compiler knows which numbers there are.
static void attend_elements(const Attention *call, const Block *block, ptrdiff_t kv_head, void *scratch) {
    Attention own = *call;
    own.heads.quantized = 0;
    attend_block(&own, block, kv_head, scratch);
}

static void attend_codes(const Attention *call, const Block *block, ptrdiff_t kv_head, void *scratch) {
    Attention own = *call;
    own.heads.quantized = 1;
    attend_block(&own, block, kv_head, scratch);
}

// Bytes of scratch that each thread needs, where no block has more than `max_rows` rows or sees more than `longest`
// positions.
ptrdiff_t attend_scratch(
    ptrdiff_t max_rows, ptrdiff_t longest, ptrdiff_t query_heads, ptrdiff_t kv_heads, ptrdiff_t head_dim) {
    const Attention call = {.stride = stride_of(longest), .heads = {query_heads, kv_heads, head_dim, 0, 0, 0}};
    ptrdiff_t count = max_rows * group_of(&call);
    size_t bytes = scratch_bytes(&call, count);
#ifdef HAS_TILES
    size_t tile_bytes = spool_has_tiles() ? tile_scratch_bytes(&call, count) : 0;
    if (tile_bytes > bytes) bytes = tile_bytes;
#endif
    return (bytes + 63) / 64 * 64;
}

// Causal attention of queries [rows, query_heads, head_dim] over pages; to the same shape. `scratch`: that of the whole
// team.
void team_attend(const Team *team, element *to, const element *queries, void *pool, const int64_t *pages,
    const Block *blocks, ptrdiff_t block_count, ptrdiff_t max_rows, ptrdiff_t longest, const Rule *rule,
    ptrdiff_t query_heads, ptrdiff_t kv_heads, ptrdiff_t head_dim, ptrdiff_t page_size, ptrdiff_t page_count,
    ptrdiff_t quantized, char *scratch) {
    assert(page_size % LANES == 0 && head_dim % (2 * LANES) == 0 && query_heads % kv_heads == 0);
    const Attention call = {to, queries, pool, pages, *rule, stride_of(longest),
        {query_heads, kv_heads, head_dim, page_size, page_count, quantized}};
    ptrdiff_t tasks = block_count * kv_heads;
    void (*attend)(const Attention *, const Block *, ptrdiff_t, void *) = quantized ? attend_codes : attend_elements;
#ifdef HAS_TILES
    if (spool_has_tiles() && !rule->window && !quantized) attend = tile_attend_block;
#endif
    char *own = scratch + team->index * attend_scratch(max_rows, longest, query_heads, kv_heads, head_dim);
    for (ptrdiff_t task; (task = take_task(team)) < tasks;)
        attend(&call, blocks + task / kv_heads, task % kv_heads, own);
    wait_for_team(team);
}

// The same with scratch of its own. Gives 0, or 1 where memory ran out.
int spool_attend(element *to, const element *queries, void *pool, const int64_t *pages, const Block *blocks,
    ptrdiff_t block_count, ptrdiff_t max_rows, ptrdiff_t longest, const Rule *rule, ptrdiff_t query_heads,
    ptrdiff_t kv_heads, ptrdiff_t head_dim, ptrdiff_t page_size, ptrdiff_t page_count, ptrdiff_t quantized) {
    char *scratch = scratch_of_team(attend_scratch(max_rows, longest, query_heads, kv_heads, head_dim));
    if (!scratch) return 1;
    WITH_TEAM(block_count * kv_heads > 1, team_attend(team, to, queries, pool, pages, blocks, block_count, max_rows,
        longest, rule, query_heads, kv_heads, head_dim, page_size, page_count, quantized, scratch));
    free(scratch);
    return 0;
}
