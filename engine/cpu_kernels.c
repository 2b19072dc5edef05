// What a decoder layer does between its linear layers, for bfloat16 rows on a CPU.
//
// Every row (in attention: every query head of a row) is computed by itself, through one sequence of operations that
// depends on nothing but its position. So its bits do not depend on what shares the call, nor on the number of threads.
//
// Sizes are in elements unless named otherwise; page_size, hidden and inner are multiples of LANES,
// head_dim of twice that.

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define LANES 16
#define AHEAD 2
#define INLINE static inline __attribute__((always_inline))

typedef uint16_t bf16;
typedef float f32v __attribute__((vector_size(4 * LANES)));
typedef int32_t i32v __attribute__((vector_size(4 * LANES)));
typedef uint32_t u32v __attribute__((vector_size(4 * LANES)));
typedef uint16_t u16v __attribute__((vector_size(2 * LANES)));

INLINE f32v splat(float x) { return x - (f32v){}; }

INLINE f32v load(const float *from) {
    f32v x;
    memcpy(&x, from, sizeof x);
    return x;
}

INLINE void store(float *to, f32v x) { memcpy(to, &x, sizeof x); }

INLINE f32v load_bf16(const bf16 *from) {
    u16v x;
    memcpy(&x, from, sizeof x);
    return (f32v)(__builtin_convertvector(x, u32v) << 16);
}

// To nearest, ties to even; NaN stays NaN.
INLINE void store_bf16(bf16 *to, f32v value) {
    u32v bits = (u32v)value;
    u32v rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    u32v nan = (u32v)(value != value);
    u16v x = __builtin_convertvector((nan & 0x7fc0) | (~nan & rounded), u16v);
    memcpy(to, &x, sizeof x);
}

INLINE f32v choose(i32v condition, f32v yes, f32v no) {
    return (f32v)((condition & (i32v)yes) | (~condition & (i32v)no));
}

INLINE float sum(f32v x) {
    float lanes[LANES];
    store(lanes, x);
    for (int step = LANES / 2; step; step /= 2)
        for (int lane = 0; lane < step; lane++) lanes[lane] += lanes[lane + step];
    return lanes[0];
}

INLINE float largest(f32v x) {
    float lanes[LANES];
    store(lanes, x);
    for (int step = LANES / 2; step; step /= 2)
        for (int lane = 0; lane < step; lane++) lanes[lane] = lanes[lane] < lanes[lane + step] ? lanes[lane + step] : lanes[lane];
    return lanes[0];
}

// e^x within a few parts in 10^7, for x <= 88; below -87, 0. NaN stays NaN.
INLINE f32v exponential(f32v x) {
    const f32v magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
    f32v bounded = choose(x < -87.0f, splat(-87.0f), x);
    f32v twos = (bounded * 1.44269504f + magic) - magic;
    f32v rest = bounded - twos * 0.693359375f;
    rest = rest - twos * -2.12194440e-4f;
    f32v series = splat(1.0f / 5040);
    series = series * rest + 1.0f / 720;
    series = series * rest + 1.0f / 120;
    series = series * rest + 1.0f / 24;
    series = series * rest + 1.0f / 6;
    series = series * rest + 0.5f;
    series = series * rest + 1.0f;
    series = series * rest + 1.0f;
    f32v power = (f32v)((__builtin_convertvector(twos, i32v) + 127) << 23);
    return choose(x < -87.0f, splat(0.0f), series * power);
}

INLINE void normalize(bf16 *to, const bf16 *from, const bf16 *weight, ptrdiff_t size, float epsilon) {
    f32v squares = splat(0.0f);
    for (ptrdiff_t i = 0; i < size; i += LANES) {
        f32v x = load_bf16(from + i);
        squares = squares + x * x;
    }
    float scale = 1.0f / sqrtf(sum(squares) / (float)size + epsilon);
    for (ptrdiff_t i = 0; i < size; i += LANES) store_bf16(to + i, load_bf16(from + i) * scale * load_bf16(weight + i));
}

// rows [rows, hidden] to their root-mean-square norms.
void spool_norm(bf16 *to, const bf16 *from, const bf16 *weight, ptrdiff_t rows, ptrdiff_t hidden, float epsilon) {
#pragma omp parallel for schedule(static) if (rows >= 16)
    for (ptrdiff_t row = 0; row < rows; row++) normalize(to + row * hidden, from + row * hidden, weight, hidden, epsilon);
}

// Adds `added` to `residual` in place, and gives the norms of the sums.
void spool_add_norm(
    bf16 *to, bf16 *residual, const bf16 *added, const bf16 *weight, ptrdiff_t rows, ptrdiff_t hidden, float epsilon) {
#pragma omp parallel for schedule(static) if (rows >= 16)
    for (ptrdiff_t row = 0; row < rows; row++) {
        bf16 *sums = residual + row * hidden;
        for (ptrdiff_t i = 0; i < hidden; i += LANES)
            store_bf16(sums + i, load_bf16(sums + i) + load_bf16(added + row * hidden + i));
        normalize(to + row * hidden, sums, weight, hidden, epsilon);
    }
}

// gate_up [rows, 2 * inner] to silu(gate) * up, [rows, inner].
void spool_silu_mul(bf16 *to, const bf16 *gate_up, ptrdiff_t rows, ptrdiff_t inner) {
#pragma omp parallel for schedule(static) if (rows >= 8)
    for (ptrdiff_t row = 0; row < rows; row++) {
        const bf16 *gate = gate_up + row * 2 * inner, *up = gate + inner;
        for (ptrdiff_t i = 0; i < inner; i += LANES) {
            f32v x = load_bf16(gate + i);
            // By e^-|x|, which neither overflows nor loses the sign's side.
            f32v small = exponential(choose(x < 0.0f, x, -x));
            f32v sigmoid = choose(x < 0.0f, small, splat(1.0f)) / (1.0f + small);
            store_bf16(to + row * inner + i, x * sigmoid * load_bf16(up + i));
        }
    }
}

typedef struct {
    ptrdiff_t query_heads, kv_heads, head_dim, page_size, pages;
} Heads;

INLINE bf16 *page_of(bf16 *pool, const Heads *heads, ptrdiff_t values, ptrdiff_t page, ptrdiff_t head) {
    return pool + ((values * heads->pages + page) * heads->kv_heads + head) * heads->page_size * heads->head_dim;
}

INLINE void rotate(bf16 *to, const bf16 *from, const float *cos, const float *sin, ptrdiff_t head_dim) {
    ptrdiff_t half = head_dim / 2;
    for (ptrdiff_t i = 0; i < half; i += LANES) {
        f32v first = load_bf16(from + i), second = load_bf16(from + half + i);
        store_bf16(to + i, first * load(cos + i) + second * load(sin + i));
        store_bf16(to + half + i, second * load(cos + half + i) + first * load(sin + half + i));
    }
}

// qkv [rows, (query_heads + 2 * kv_heads) * head_dim]: queries are rotated by halves to [rows, query_heads, head_dim];
// keys, rotated, and values go to the slots [rows] of pool [2, pages, kv_heads, page_size, head_dim]. cos and sin are
// [rows, head_dim], the first half of sin negated. Where the norms' weights [head_dim] are given, queries and keys are normalized before.
void spool_rotate_write(
    bf16 *queries, bf16 *pool, const bf16 *qkv, const float *cos, const float *sin, const int64_t *slots,
    const bf16 *query_norm, const bf16 *key_norm, float epsilon, ptrdiff_t rows, ptrdiff_t query_heads,
    ptrdiff_t kv_heads, ptrdiff_t head_dim, ptrdiff_t page_size, ptrdiff_t pages) {
    const Heads shape = {query_heads, kv_heads, head_dim, page_size, pages}, *heads = &shape;
#pragma omp parallel for schedule(static) if (rows >= 16)
    for (ptrdiff_t row = 0; row < rows; row++) {
        const bf16 *from = qkv + row * (query_heads + 2 * kv_heads) * head_dim;
        const float *row_cos = cos + row * head_dim, *row_sin = sin + row * head_dim;
        ptrdiff_t page = slots[row] / heads->page_size, offset = slots[row] % heads->page_size;
        bf16 normalized[head_dim];
        for (ptrdiff_t head = 0; head < query_heads + kv_heads; head++, from += head_dim) {
            const bf16 *source = from, *norm = head < query_heads ? query_norm : key_norm;
            if (norm) {
                normalize(normalized, from, norm, head_dim, epsilon);
                source = normalized;
            }
            bf16 *to = head < query_heads
                           ? queries + (row * query_heads + head) * head_dim
                           : page_of(pool, heads, 0, page, head - query_heads) + offset * head_dim;
            rotate(to, source, row_cos, row_sin, head_dim);
        }
        for (ptrdiff_t head = 0; head < kv_heads; head++, from += head_dim)
            memcpy(page_of(pool, heads, 1, page, head) + offset * head_dim, from, head_dim * sizeof *from);
    }
}

// Swaps the off-diagonal blocks of `step` lanes in a pair of rows: one stage of a transposition.
#define SWAP_BLOCKS(step)                                                                    \
    for (int i = 0; i < LANES; i++)                                                          \
        if (!(i & step)) {                                                                   \
            u32v low = rows[i], high = rows[i + step];                                       \
            i32v upper = (lane & step) != 0;                                                 \
            rows[i] = __builtin_shuffle(low, high, (u32v)(lane + (upper & (LANES - step)))); \
            rows[i + step] = __builtin_shuffle(low, high, (u32v)(lane + (upper & LANES) + (~upper & step))); \
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
INLINE void value_block(
    int count, float *outputs, const float *weights, ptrdiff_t stride, const float *values, ptrdiff_t positions,
    ptrdiff_t head_dim) {
    for (ptrdiff_t first = 0; first < head_dim; first += 4 * LANES) {
        int parts = head_dim - first >= 4 * LANES ? 4 : (int)((head_dim - first) / LANES);
        if (parts == 4) {
            f32v sums[3][4];
#pragma GCC unroll 3
            for (int query = 0; query < count; query++)
#pragma GCC unroll 4
                for (int part = 0; part < 4; part++) sums[query][part] = load(outputs + query * head_dim + first + part * LANES);
            for (ptrdiff_t position = 0; position < positions; position++) {
                const float *value = values + position * head_dim + first;
#pragma GCC unroll 3
                for (int query = 0; query < count; query++)
#pragma GCC unroll 4
                    for (int part = 0; part < 4; part++)
                        sums[query][part] = sums[query][part] + load(value + part * LANES) * weights[query * stride + position];
            }
#pragma GCC unroll 3
            for (int query = 0; query < count; query++)
#pragma GCC unroll 4
                for (int part = 0; part < 4; part++) store(outputs + query * head_dim + first + part * LANES, sums[query][part]);
        } else {
            for (int query = 0; query < count; query++)
                for (int part = 0; part < parts; part++) {
                    float *output = outputs + query * head_dim + first + part * LANES;
                    f32v total = load(output);
                    for (ptrdiff_t position = 0; position < positions; position++)
                        total = total + load(values + position * head_dim + first + part * LANES) * weights[query * stride + position];
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

// Packed rows [first_row, first_row + rows) are the positions from start on of a sequence whose pages are listed from
// first_page on.
typedef struct {
    int64_t first_row, rows, start, first_page;
} Block;

// Keys (values: 0) or values (1) of LANES positions from `position` on, a multiple of LANES.
INLINE const bf16 *run_of(
    bf16 *pool, const Heads *heads, ptrdiff_t values, const int64_t *listed, ptrdiff_t position, ptrdiff_t head) {
    return page_of(pool, heads, values, listed[position / heads->page_size], head) +
           position % heads->page_size * heads->head_dim;
}

// Attention of one KV head's queries in a block. Scratch: queries and outputs [rows * group, head_dim], keys
// [head_dim, LANES] or values [LANES, head_dim], scores [rows * group, stride].
static void attend_block(
    bf16 *to, const bf16 *queries, bf16 *pool, const int64_t *pages, const Block *block, ptrdiff_t kv_head, float scaling,
    float *scratch, ptrdiff_t stride, const Heads *heads) {
    ptrdiff_t head_dim = heads->head_dim, group = heads->query_heads / heads->kv_heads;
    ptrdiff_t count = block->rows * group, last = block->start + block->rows;
    const int64_t *listed = pages + block->first_page;
    float *rows = scratch, *outputs = rows + count * head_dim, *page = outputs + count * head_dim;
    float *scores = page + LANES * head_dim;
    for (ptrdiff_t query = 0; query < count; query++) {
        ptrdiff_t row = block->first_row + query / group, head = kv_head * group + query % group;
        for (ptrdiff_t i = 0; i < head_dim; i += LANES)
            store(rows + query * head_dim + i, load_bf16(queries + (row * heads->query_heads + head) * head_dim + i) * scaling);
    }
    for (ptrdiff_t position = 0; position < last; position += LANES) {
        ptrdiff_t ahead = position + AHEAD * LANES;
        if (ahead < last) fetch_ahead(run_of(pool, heads, 0, listed, ahead, kv_head), LANES * head_dim);
        transpose(page, run_of(pool, heads, 0, listed, position, kv_head), head_dim);
        ptrdiff_t query = position > block->start ? (position - block->start) * group : 0;
        for (; query + 6 <= count; query += 6)
            score_block(6, scores + query * stride + position, stride, rows + query * head_dim, page, head_dim);
        for (; query + 3 <= count; query += 3)
            score_block(3, scores + query * stride + position, stride, rows + query * head_dim, page, head_dim);
        for (; query < count; query++)
            score_block(1, scores + query * stride + position, stride, rows + query * head_dim, page, head_dim);
    }
    for (ptrdiff_t query = 0; query < count; query++) softmax(scores + query * stride, block->start + query / group + 1);
    memset(outputs, 0, count * head_dim * sizeof *outputs);
    for (ptrdiff_t position = 0; position < last; position += LANES) {
        ptrdiff_t ahead = position + AHEAD * LANES;
        if (ahead < last) fetch_ahead(run_of(pool, heads, 1, listed, ahead, kv_head), LANES * head_dim);
        const bf16 *values = run_of(pool, heads, 1, listed, position, kv_head);
        ptrdiff_t held = last - position < LANES ? last - position : LANES;
        for (ptrdiff_t i = 0; i < held * head_dim; i += LANES) store(page + i, load_bf16(values + i));
        ptrdiff_t query = position > block->start ? (position - block->start) * group : 0;
        // Rows that do not see all of these positions, one by one: what they do not see may be no number.
        for (; query < count && block->start + query / group + 1 < position + LANES; query++)
            value_block(1, outputs + query * head_dim, scores + query * stride + position, stride, page,
                        block->start + query / group + 1 - position, head_dim);
        for (; query + 3 <= count; query += 3)
            value_block(3, outputs + query * head_dim, scores + query * stride + position, stride, page, LANES, head_dim);
        for (; query < count; query++)
            value_block(1, outputs + query * head_dim, scores + query * stride + position, stride, page, LANES, head_dim);
    }
    for (ptrdiff_t query = 0; query < count; query++) {
        ptrdiff_t row = block->first_row + query / group, head = kv_head * group + query % group;
        for (ptrdiff_t i = 0; i < head_dim; i += LANES)
            store_bf16(to + (row * heads->query_heads + head) * head_dim + i, load(outputs + query * head_dim + i));
    }
}

// Causal attention of queries [rows, query_heads, head_dim] over pages; to the same shape. No block has more than
// `most_rows` rows or sees more than `longest` positions. Gives 0, or 1 where memory ran out.
int spool_attend(
    bf16 *to, const bf16 *queries, bf16 *pool, const int64_t *pages, const Block *blocks, ptrdiff_t block_count,
    ptrdiff_t most_rows, ptrdiff_t longest, float scaling, ptrdiff_t query_heads, ptrdiff_t kv_heads, ptrdiff_t head_dim,
    ptrdiff_t page_size, ptrdiff_t page_count) {
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
                attend_block(to, queries, pool, pages, blocks + task / kv_heads, task % kv_heads, scaling, scratch, stride,
                             heads);
        free(scratch);
    }
    return failed;
}

#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
#include <immintrin.h>

// Output columns of a panel of weights, and the most rows that share a reading of it: as registers hold.
#define PANEL (2 * LANES)
#define TILE 12
// Bytes of weights from a load to the one that is asked for meanwhile: past the page where hardware stops to look ahead.
#define WEIGHTS_AHEAD 8192

INLINE __m512bh pairs(const bf16 *from) { return (__m512bh)_mm512_loadu_si512(from); }

// `count` rows [in] by a panel [in / 2, PANEL, 2] to [count, out], of which `columns` are there. Each output is one chain
// of sums, from the bias on, in the order of inputs, two at a time.
INLINE void multiply(
    int count, bf16 *to, const bf16 *rows, const bf16 *panel, const float *bias, ptrdiff_t in, ptrdiff_t out,
    ptrdiff_t columns) {
    __m512 sums[TILE][2];
#pragma GCC unroll 12
    for (int row = 0; row < count; row++)
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) sums[row][half] = bias ? _mm512_loadu_ps(bias + half * LANES) : _mm512_setzero_ps();
    for (ptrdiff_t i = 0; i < in; i += 2) {
        __builtin_prefetch((const char *)(panel + i * PANEL) + WEIGHTS_AHEAD);
        __builtin_prefetch((const char *)(panel + i * PANEL + 2 * LANES) + WEIGHTS_AHEAD);
        __m512bh weights[2] = {pairs(panel + i * PANEL), pairs(panel + i * PANEL + 2 * LANES)};
#pragma GCC unroll 12
        for (int row = 0; row < count; row++) {
            int32_t pair;
            memcpy(&pair, rows + row * in + i, sizeof pair);
            __m512bh inputs = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 2
            for (int half = 0; half < 2; half++) sums[row][half] = _mm512_dpbf16_ps(sums[row][half], weights[half], inputs);
        }
    }
#pragma GCC unroll 12
    for (int row = 0; row < count; row++) {
        bf16 outputs[PANEL];
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++)
            store_bf16(outputs + half * LANES, (f32v)sums[row][half]);
        memcpy(to + row * out, outputs, columns * sizeof *outputs);
    }
}

// rows [count, in] by weights [panels, in / 2, PANEL, 2], plus bias [panels * PANEL] if there is one, to [count, out].
void spool_linear(
    bf16 *to, const bf16 *rows, const bf16 *weights, const float *bias, ptrdiff_t count, ptrdiff_t in, ptrdiff_t out) {
    ptrdiff_t panels = (out + PANEL - 1) / PANEL, tiles = (count + TILE - 1) / TILE;
#pragma omp parallel for schedule(static)
    for (ptrdiff_t panel = 0; panel < panels; panel++) {
        const bf16 *panel_weights = weights + panel * in * PANEL;
        const float *panel_bias = bias ? bias + panel * PANEL : NULL;
        ptrdiff_t columns = out - panel * PANEL < PANEL ? out - panel * PANEL : PANEL;
        for (ptrdiff_t tile = 0; tile < tiles; tile++) {
            ptrdiff_t first = tile * count / tiles, height = (tile + 1) * count / tiles - first;
#define HEIGHT(rows_) \
    case rows_:       \
        multiply(rows_, to + first * out + panel * PANEL, rows + first * in, panel_weights, panel_bias, in, out, columns); \
        break;
            switch (height) {
                HEIGHT(1) HEIGHT(2) HEIGHT(3) HEIGHT(4) HEIGHT(5) HEIGHT(6)
                HEIGHT(7) HEIGHT(8) HEIGHT(9) HEIGHT(10) HEIGHT(11) HEIGHT(12)
            }
        }
    }
}
#endif
