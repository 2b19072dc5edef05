// Causal attention over KV pages where they lie.

#include "attention.h"

// Scores of `count` queries over `runs` times LANES keys, each one chain of sums in the order of dimensions, two at a
// time.
INLINE void score_block(int count, int runs, float *scores, ptrdiff_t stride, const bf16 *queries, const u32v *keys,
    ptrdiff_t head_dim) {
    f32v sums[6][RUNS];
#pragma GCC unroll 6
    for (int query = 0; query < count; query++)
#pragma GCC unroll 2
        for (int run = 0; run < runs; run++) sums[query][run] = splat(0.0f);
    for (ptrdiff_t pair = 0; pair < head_dim / 2; pair++) {
#pragma GCC unroll 6
        for (int query = 0; query < count; query++) {
            uint32_t by;
            memcpy(&by, queries + query * head_dim + 2 * pair, sizeof by);
#pragma GCC unroll 2
            for (int run = 0; run < runs; run++)
                sums[query][run] = add_products(sums[query][run], keys[run * head_dim / 2 + pair], by - (u32v){});
        }
    }
#pragma GCC unroll 6
    for (int query = 0; query < count; query++)
#pragma GCC unroll 2
        for (int run = 0; run < runs; run++) store(scores + query * stride + run * LANES, sums[query][run]);
}

// The same for any number of queries.
INLINE void score_queries(int runs, float *scores, ptrdiff_t stride, const bf16 *queries, ptrdiff_t count,
    const u32v *keys, ptrdiff_t head_dim) {
    ptrdiff_t query = 0;
    for (; query + 6 <= count; query += 6)
        score_block(6, runs, scores + query * stride, stride, queries + query * head_dim, keys, head_dim);
    for (; query + 3 <= count; query += 3)
        score_block(3, runs, scores + query * stride, stride, queries + query * head_dim, keys, head_dim);
    for (; query < count; query++)
        score_block(1, runs, scores + query * stride, stride, queries + query * head_dim, keys, head_dim);
}

// Bytes of scratch that a block of up to `count` queries needs.
static size_t scratch_bytes(const Attention *call, ptrdiff_t count) {
    ptrdiff_t head_dim = call->heads.head_dim;
    return RUNS * head_dim / 2 * sizeof(u32v) + count * (call->stride * sizeof(float) + head_dim * sizeof(bf16));
}

// Attention of one KV head's queries in a block. Scratch: RUNS runs of keys [head_dim / 2, LANES], scores
// [rows * group, stride], queries [rows * group, head_dim].
static void attend_block(const Attention *call, const Block *block, ptrdiff_t kv_head, void *scratch) {
    ptrdiff_t head_dim = call->heads.head_dim, stride = call->stride, group = group_of(call);
    ptrdiff_t count = block->rows * group, last = block->start + block->rows;
    u32v *keys = scratch;
    float *scores = (float *)(keys + RUNS * head_dim / 2);
    bf16 *queries = (bf16 *)(scores + count * stride);
    gather_queries(queries, call, block, kv_head);
    for (ptrdiff_t position = 0; position < last; position += RUNS * LANES) {
        int runs = take_keys(keys, call, block, kv_head, position);
        ptrdiff_t first = position > block->start ? (position - block->start) * group : 0;
        float *to = scores + first * stride + position;
        if (runs == RUNS)
            score_queries(RUNS, to, stride, queries + first * head_dim, count - first, keys, head_dim);
        else
            score_queries(1, to, stride, queries + first * head_dim, count - first, keys, head_dim);
    }
    for (ptrdiff_t row = 0; row < block->rows; row++) {
        float *weights = scores + row * group * stride;
        for (ptrdiff_t query = 0; query < group; query++)
            softmax(weights + query * stride, block->start + row + 1, call->scaling);
        sum_row_values(call, block, kv_head, row, weights, weights, 0);
    }
}

// Causal attention of queries [rows, query_heads, head_dim] over pages; to the same shape. No block has more than
// `max_rows` rows or sees more than `longest` positions. Gives 0, or 1 where memory ran out.
int spool_attend(bf16 *to, const bf16 *queries, bf16 *pool, const int64_t *pages, const Block *blocks,
    ptrdiff_t block_count, ptrdiff_t max_rows, ptrdiff_t longest, float scaling, ptrdiff_t query_heads,
    ptrdiff_t kv_heads, ptrdiff_t head_dim, ptrdiff_t page_size, ptrdiff_t page_count) {
    ptrdiff_t together = RUNS * LANES, stride = (longest + together - 1) / together * together;
    const Attention call = {
        to, queries, pool, pages, scaling, stride, {query_heads, kv_heads, head_dim, page_size, page_count}};
    ptrdiff_t count = max_rows * group_of(&call), tasks = block_count * kv_heads;
    int by_tiles = spool_has_tiles();
    size_t bytes = by_tiles ? tile_scratch_bytes(&call, count) : scratch_bytes(&call, count);
    int failed = 0;
#pragma omp parallel reduction(| : failed) if (tasks > 1)
    {
        void *scratch = aligned_alloc(64, (bytes + 63) / 64 * 64);
        failed = !scratch;
#pragma omp for schedule(dynamic, 1)
        for (ptrdiff_t task = 0; task < tasks; task++)
            if (scratch)
                (by_tiles ? tile_attend_block : attend_block)(
                    &call, blocks + task / kv_heads, task % kv_heads, scratch);
        free(scratch);
    }
    return failed;
}
