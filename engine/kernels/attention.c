// Causal attention over KV pages where they lie.

#include "kernels.h"
#include "pages.h"

// Runs of LANES positions from one whose keys are computed with to the one whose keys are asked for meanwhile.
#define AHEAD 2
// Runs whose scores are computed at once: the chains of one would wait for each other.
#define RUNS 2
// Queries whose outputs are summed up at once.
#define MOST_WEIGHED 4

// Swaps the off-diagonal blocks of `step` lanes in a pair of rows: one stage of a transposition.
#define SWAP_BLOCKS(step)                                                                                              \
    for (int i = 0; i < LANES; i++)                                                                                    \
        if (!(i & step)) {                                                                                             \
            u32v low = rows[i], high = rows[i + step];                                                                 \
            i32v upper = (lane & step) != 0;                                                                           \
            rows[i] = __builtin_shuffle(low, high, (u32v)(lane + (upper & (LANES - step))));                           \
            rows[i + step] = __builtin_shuffle(low, high, (u32v)(lane + (upper & LANES) + (~upper & step)));           \
        }

// Keys [LANES, head_dim] to pairs of dimensions [head_dim / 2, LANES].
INLINE void transpose(u32v *to, const bf16 *keys, ptrdiff_t head_dim) {
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
        for (int i = 0; i < LANES; i++) to[first / 2 + i] = rows[i];
    }
}

// Scores of `count` queries over `runs` times LANES keys, each one chain of sums in the order of dimensions, two at a
// time.
INLINE void score_block(int count, int runs, float *scores, ptrdiff_t stride, const bf16 *queries, const u32v *keys,
    float scaling, ptrdiff_t head_dim) {
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
        for (int run = 0; run < runs; run++) store(scores + query * stride + run * LANES, sums[query][run] * scaling);
}

// The same for any number of queries.
INLINE void score_queries(int runs, float *scores, ptrdiff_t stride, const bf16 *queries, ptrdiff_t count,
    const u32v *keys, float scaling, ptrdiff_t head_dim) {
    ptrdiff_t query = 0;
    for (; query + 6 <= count; query += 6)
        score_block(6, runs, scores + query * stride, stride, queries + query * head_dim, keys, scaling, head_dim);
    for (; query + 3 <= count; query += 3)
        score_block(3, runs, scores + query * stride, stride, queries + query * head_dim, keys, scaling, head_dim);
    for (; query < count; query++)
        score_block(1, runs, scores + query * stride, stride, queries + query * head_dim, keys, scaling, head_dim);
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

// What comes next lies on another page, which no hardware foresees.
INLINE void fetch_ahead(const bf16 *from, ptrdiff_t size) {
    for (ptrdiff_t i = 0; i < size; i += 32) __builtin_prefetch(from + i);
}

// Keys (values: 0) or values (1) of LANES positions from `position` on, a multiple of LANES.
INLINE const bf16 *run_of(
    bf16 *pool, const Heads *heads, ptrdiff_t values, const int64_t *listed, ptrdiff_t position, ptrdiff_t head) {
    return page_of(pool, heads, values, listed[position / heads->page_size], head) +
           position % heads->page_size * heads->head_dim;
}

// Of `count` queries that see the same positions, `parts` times LANES dimensions from `first` on of what their weights
// make of the values: each one chain of sums in the order of positions.
INLINE void weigh(int count, int parts, bf16 *to, const float *weights, ptrdiff_t stride, ptrdiff_t seen, bf16 *pool,
    const int64_t *listed, ptrdiff_t kv_head, ptrdiff_t first, const Heads *heads) {
    f32v sums[MOST_WEIGHED][4];
#pragma GCC unroll 4
    for (int query = 0; query < count; query++)
#pragma GCC unroll 4
        for (int part = 0; part < parts; part++) sums[query][part] = splat(0.0f);
    for (ptrdiff_t run = 0; run < seen; run += LANES) {
        const bf16 *values = run_of(pool, heads, 1, listed, run, kv_head) + first;
        ptrdiff_t end = seen - run < LANES ? seen : run + LANES;
        for (ptrdiff_t position = run; position < end; position++, values += heads->head_dim) {
            f32v value[4];
#pragma GCC unroll 4
            for (int part = 0; part < parts; part++) value[part] = load_bf16(values + part * LANES);
#pragma GCC unroll 4
            for (int query = 0; query < count; query++)
#pragma GCC unroll 4
                for (int part = 0; part < parts; part++)
                    sums[query][part] = sums[query][part] + value[part] * weights[query * stride + position];
        }
    }
#pragma GCC unroll 4
    for (int query = 0; query < count; query++)
#pragma GCC unroll 4
        for (int part = 0; part < parts; part++)
            store_bf16(to + query * heads->head_dim + first + part * LANES, sums[query][part]);
}

// All dimensions of up to MOST_WEIGHED queries.
INLINE void weigh_queries(int count, bf16 *to, const float *weights, ptrdiff_t stride, ptrdiff_t seen, bf16 *pool,
    const int64_t *listed, ptrdiff_t kv_head, const Heads *heads) {
    ptrdiff_t first = 0;
    for (; first + 4 * LANES <= heads->head_dim; first += 4 * LANES)
        weigh(count, 4, to, weights, stride, seen, pool, listed, kv_head, first, heads);
    for (; first < heads->head_dim; first += 2 * LANES)
        weigh(count, 2, to, weights, stride, seen, pool, listed, kv_head, first, heads);
}

// Attention of one KV head's queries in a block. Scratch: RUNS runs of keys [head_dim / 2, LANES], scores
// [rows * group, stride], queries [rows * group, head_dim].
static void attend_block(bf16 *to, const bf16 *queries, bf16 *pool, const int64_t *pages, const Block *block,
    ptrdiff_t kv_head, float scaling, void *scratch, ptrdiff_t stride, const Heads *heads) {
    ptrdiff_t head_dim = heads->head_dim, group = heads->query_heads / heads->kv_heads;
    ptrdiff_t count = block->rows * group, last = block->start + block->rows;
    const int64_t *listed = pages + block->first_page;
    u32v *keys = scratch;
    float *scores = (float *)(keys + RUNS * head_dim / 2);
    bf16 *rows = (bf16 *)(scores + count * stride);
    for (ptrdiff_t row = 0; row < block->rows; row++)
        memcpy(rows + row * group * head_dim,
            queries + ((block->first_row + row) * heads->query_heads + kv_head * group) * head_dim,
            group * head_dim * sizeof *rows);
    for (ptrdiff_t position = 0; position < last; position += RUNS * LANES) {
        int runs = last - position > LANES ? RUNS : 1;
        for (int run = 0; run < runs; run++) {
            ptrdiff_t here = position + run * LANES, ahead = here + AHEAD * LANES;
            if (ahead < last) fetch_ahead(run_of(pool, heads, 0, listed, ahead, kv_head), LANES * head_dim);
            // Values come while there is something to compute: their turn has little of that.
            fetch_ahead(run_of(pool, heads, 1, listed, here, kv_head), LANES * head_dim);
            transpose(keys + run * head_dim / 2, run_of(pool, heads, 0, listed, here, kv_head), head_dim);
        }
        ptrdiff_t first = position > block->start ? (position - block->start) * group : 0;
        float *from = scores + first * stride + position;
        if (runs == RUNS)
            score_queries(RUNS, from, stride, rows + first * head_dim, count - first, keys, scaling, head_dim);
        else
            score_queries(1, from, stride, rows + first * head_dim, count - first, keys, scaling, head_dim);
    }
    for (ptrdiff_t query = 0; query < count; query++)
        softmax(scores + query * stride, block->start + query / group + 1);
    for (ptrdiff_t row = 0; row < block->rows; row++)
        for (ptrdiff_t done = 0; done < group; done += MOST_WEIGHED) {
            bf16 *of = to + ((block->first_row + row) * heads->query_heads + kv_head * group + done) * head_dim;
            const float *weights = scores + (row * group + done) * stride;
            ptrdiff_t seen = block->start + row + 1;
            switch (group - done) {
            case 1: weigh_queries(1, of, weights, stride, seen, pool, listed, kv_head, heads); break;
            case 2: weigh_queries(2, of, weights, stride, seen, pool, listed, kv_head, heads); break;
            case 3: weigh_queries(3, of, weights, stride, seen, pool, listed, kv_head, heads); break;
            default: weigh_queries(4, of, weights, stride, seen, pool, listed, kv_head, heads);
            }
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
    size_t bytes =
        RUNS * head_dim / 2 * sizeof(u32v) + count * stride * sizeof(float) + count * head_dim * sizeof(bf16);
    int failed = 0;
#pragma omp parallel reduction(| : failed) if (tasks > 1)
    {
        void *scratch = aligned_alloc(64, (bytes + 63) / 64 * 64);
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
