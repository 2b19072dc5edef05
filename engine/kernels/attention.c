// Causal attention over KV pages where they lie.

#include "kernels.h"
#include "pages.h"

// Runs of LANES positions from one that is computed to the one that is asked for meanwhile.
#define AHEAD 2

// Swaps the off-diagonal blocks of `step` lanes in a pair of rows: one stage of a transposition.
#define SWAP_BLOCKS(step)                                                                                              \
    for (int i = 0; i < LANES; i++)                                                                                    \
        if (!(i & step)) {                                                                                             \
            u32v low = rows[i], high = rows[i + step];                                                                 \
            i32v upper = (lane & step) != 0;                                                                           \
            rows[i] = __builtin_shuffle(low, high, (u32v)(lane + (upper & (LANES - step))));                           \
            rows[i + step] = __builtin_shuffle(low, high, (u32v)(lane + (upper & LANES) + (~upper & step)));           \
        }

// Keys [LANES, head_dim] to float32 [head_dim, LANES]; in pairs, of which two fit a lane.
INLINE void transpose(float *to, const bf16 *keys, ptrdiff_t head_dim) {
    const i32v lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (ptrdiff_t first = 0; first < head_dim; first += 2 * LANES) {
        u32v rows[LANES];
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) memcpy(&rows[i], keys + i * head_dim + first, sizeof rows[i]);
#pragma GCC unroll 16
        SWAP_BLOCKS(8)
#pragma GCC unroll 16
        SWAP_BLOCKS(4)
#pragma GCC unroll 16
        SWAP_BLOCKS(2)
#pragma GCC unroll 16
        SWAP_BLOCKS(1)
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) {
            store(to + (first + 2 * i) * LANES, (f32v)(rows[i] << 16));
            store(to + (first + 2 * i + 1) * LANES, (f32v)(rows[i] & 0xffff0000));
        }
    }
}

// Scores of `count` queries over LANES keys, each one chain of fused additions in the order of dimensions.
INLINE void score_block(
    int count, float *scores, ptrdiff_t stride, const float *queries, const float *keys, ptrdiff_t head_dim) {
    f32v sums[6];
#pragma GCC unroll 6
    for (int query = 0; query < count; query++) sums[query] = splat(0.0f);
    for (ptrdiff_t i = 0; i < head_dim; i++) {
        f32v key = load(keys + i * LANES);
#pragma GCC unroll 6
        for (int query = 0; query < count; query++) sums[query] = sums[query] + key * queries[query * head_dim + i];
    }
#pragma GCC unroll 6
    for (int query = 0; query < count; query++) store(scores + query * stride, sums[query]);
}

// Adds `positions` values [positions, head_dim], by their weights, to the outputs of `count` queries, in their order.
INLINE void value_block(int count, float *outputs, const float *weights, ptrdiff_t stride, const float *values,
    ptrdiff_t positions, ptrdiff_t head_dim) {
    for (ptrdiff_t first = 0; first < head_dim; first += 4 * LANES) {
        int parts = head_dim - first >= 4 * LANES ? 4 : (int)((head_dim - first) / LANES);
        if (parts == 4) {
            f32v sums[3][4];
#pragma GCC unroll 3
            for (int query = 0; query < count; query++)
#pragma GCC unroll 4
                for (int part = 0; part < 4; part++)
                    sums[query][part] = load(outputs + query * head_dim + first + part * LANES);
            for (ptrdiff_t position = 0; position < positions; position++) {
                const float *value = values + position * head_dim + first;
#pragma GCC unroll 3
                for (int query = 0; query < count; query++)
#pragma GCC unroll 4
                    for (int part = 0; part < 4; part++)
                        sums[query][part] =
                            sums[query][part] + load(value + part * LANES) * weights[query * stride + position];
            }
#pragma GCC unroll 3
            for (int query = 0; query < count; query++)
#pragma GCC unroll 4
                for (int part = 0; part < 4; part++)
                    store(outputs + query * head_dim + first + part * LANES, sums[query][part]);
        } else {
            for (int query = 0; query < count; query++)
                for (int part = 0; part < parts; part++) {
                    float *output = outputs + query * head_dim + first + part * LANES;
                    f32v total = load(output);
                    for (ptrdiff_t position = 0; position < positions; position++)
                        total = total + load(values + position * head_dim + first + part * LANES) *
                                            weights[query * stride + position];
                    store(output, total);
                }
        }
    }
}

INLINE void softmax(float *scores, ptrdiff_t seen) {
    ptrdiff_t whole = (seen + LANES - 1) / LANES * LANES;
    for (ptrdiff_t i = seen; i < whole; i++) scores[i] = -INFINITY;
    f32v most = load(scores);
    for (ptrdiff_t i = LANES; i < whole; i += LANES) {
        f32v x = load(scores + i);
        most = choose(most < x, x, most);
    }
    float highest = largest(most);
    f32v total = splat(0.0f);
    for (ptrdiff_t i = 0; i < whole; i += LANES) {
        f32v x = exponential(load(scores + i) - highest);
        store(scores + i, x);
        total = total + x;
    }
    float share = 1.0f / sum(total);
    for (ptrdiff_t i = 0; i < whole; i += LANES) store(scores + i, load(scores + i) * share);
}

// The next keys or values lie on another page, which no hardware foresees.
INLINE void fetch_ahead(const bf16 *from, ptrdiff_t size) {
    for (ptrdiff_t i = 0; i < size; i += 32) __builtin_prefetch(from + i);
}

// Keys (values: 0) or values (1) of LANES positions from `position` on, a multiple of LANES.
INLINE const bf16 *run_of(
    bf16 *pool, const Heads *heads, ptrdiff_t values, const int64_t *listed, ptrdiff_t position, ptrdiff_t head) {
    return page_of(pool, heads, values, listed[position / heads->page_size], head) +
           position % heads->page_size * heads->head_dim;
}

// Attention of one KV head's queries in a block. Scratch: queries and outputs [rows * group, head_dim], keys
// [head_dim, LANES] or values [LANES, head_dim], scores [rows * group, stride].
static void attend_block(bf16 *to, const bf16 *queries, bf16 *pool, const int64_t *pages, const Block *block,
    ptrdiff_t kv_head, float scaling, float *scratch, ptrdiff_t stride, const Heads *heads) {
    ptrdiff_t head_dim = heads->head_dim, group = heads->query_heads / heads->kv_heads;
    ptrdiff_t count = block->rows * group, last = block->start + block->rows;
    const int64_t *listed = pages + block->first_page;
    float *rows = scratch, *outputs = rows + count * head_dim, *page = outputs + count * head_dim;
    float *scores = page + LANES * head_dim;
    for (ptrdiff_t query = 0; query < count; query++) {
        ptrdiff_t row = block->first_row + query / group, head = kv_head * group + query % group;
        for (ptrdiff_t i = 0; i < head_dim; i += LANES)
            store(rows + query * head_dim + i,
                load_bf16(queries + (row * heads->query_heads + head) * head_dim + i) * scaling);
    }
    for (ptrdiff_t position = 0; position < last; position += LANES) {
        ptrdiff_t ahead = position + AHEAD * LANES;
        if (ahead < last)
            fetch_ahead(run_of(pool, heads, 0, listed, ahead, kv_head), LANES * head_dim);
        transpose(page, run_of(pool, heads, 0, listed, position, kv_head), head_dim);
        ptrdiff_t query = position > block->start ? (position - block->start) * group : 0;
        for (; query + 6 <= count; query += 6)
            score_block(6, scores + query * stride + position, stride, rows + query * head_dim, page, head_dim);
        for (; query + 3 <= count; query += 3)
            score_block(3, scores + query * stride + position, stride, rows + query * head_dim, page, head_dim);
        for (; query < count; query++)
            score_block(1, scores + query * stride + position, stride, rows + query * head_dim, page, head_dim);
    }
    for (ptrdiff_t query = 0; query < count; query++)
        softmax(scores + query * stride, block->start + query / group + 1);
    memset(outputs, 0, count * head_dim * sizeof *outputs);
    for (ptrdiff_t position = 0; position < last; position += LANES) {
        ptrdiff_t ahead = position + AHEAD * LANES;
        if (ahead < last)
            fetch_ahead(run_of(pool, heads, 1, listed, ahead, kv_head), LANES * head_dim);
        const bf16 *values = run_of(pool, heads, 1, listed, position, kv_head);
        ptrdiff_t held = last - position < LANES ? last - position : LANES;
        for (ptrdiff_t i = 0; i < held * head_dim; i += LANES) store(page + i, load_bf16(values + i));
        ptrdiff_t query = position > block->start ? (position - block->start) * group : 0;
        // Rows that do not see all of these positions, one by one: what they do not see may be no number.
        for (; query < count && block->start + query / group + 1 < position + LANES; query++)
            value_block(1, outputs + query * head_dim, scores + query * stride + position, stride, page,
                block->start + query / group + 1 - position, head_dim);
        for (; query + 3 <= count; query += 3)
            value_block(
                3, outputs + query * head_dim, scores + query * stride + position, stride, page, LANES, head_dim);
        for (; query < count; query++)
            value_block(
                1, outputs + query * head_dim, scores + query * stride + position, stride, page, LANES, head_dim);
    }
    for (ptrdiff_t query = 0; query < count; query++) {
        ptrdiff_t row = block->first_row + query / group, head = kv_head * group + query % group;
        for (ptrdiff_t i = 0; i < head_dim; i += LANES)
            store_bf16(to + (row * heads->query_heads + head) * head_dim + i, load(outputs + query * head_dim + i));
    }
}

// Causal attention of queries [rows, query_heads, head_dim] over pages; to the same shape. No block has more than
// `most_rows` rows or sees more than `longest` positions. Gives 0, or 1 where memory ran out.
int spool_attend(bf16 *to, const bf16 *queries, bf16 *pool, const int64_t *pages, const Block *blocks,
    ptrdiff_t block_count, ptrdiff_t most_rows, ptrdiff_t longest, float scaling, ptrdiff_t query_heads,
    ptrdiff_t kv_heads, ptrdiff_t head_dim, ptrdiff_t page_size, ptrdiff_t page_count) {
    const Heads shape = {query_heads, kv_heads, head_dim, page_size, page_count}, *heads = &shape;
    ptrdiff_t stride = (longest + LANES - 1) / LANES * LANES;
    ptrdiff_t count = most_rows * (query_heads / kv_heads), tasks = block_count * kv_heads;
    size_t bytes = (2 * count * head_dim + LANES * head_dim + count * stride) * sizeof(float);
    int failed = 0;
#pragma omp parallel reduction(| : failed) if (tasks > 1)
    {
        float *scratch = aligned_alloc(64, (bytes + 63) / 64 * 64);
        failed = !scratch;
#pragma omp for schedule(dynamic, 1)
        for (ptrdiff_t task = 0; task < tasks; task++)
            if (scratch)
                attend_block(to, queries, pool, pages, blocks + task / kv_heads, task % kv_heads, scaling, scratch,
                    stride, heads);
        free(scratch);
    }
    return failed;
}
