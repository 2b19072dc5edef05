// Attention by the processor's matrix tiles (AMX).

#include "amx.h"
#include "attention.h"

#ifdef HAS_TILES

// Positions whose values are weighed at once; what is left over of them is weighed one by one.
#define SPAN TILE_INPUTS
// Dimensions of outputs that are summed up at once, two tiles of upper and two of lower sums.
#define WIDTH (4 * LANES)

INLINE ptrdiff_t whole_spans(ptrdiff_t seen) { return seen / SPAN * SPAN; }

typedef uint16_t u16w __attribute__((vector_size(4 * LANES)));

typedef struct {
    u32v *keys;    // [RUNS, head_dim / 2, LANES]
    bf16 *values;  // [SPAN / 2, WIDTH, 2]
    float *scores; // [count, stride]
    float *sums;   // [count, head_dim]
    bf16 *queries; // [count, head_dim]
    bf16 *high;    // [count, stride]: weights to 8 bits,
    bf16 *low;     // and what is left of them
} Scratch;

static Scratch parts_of(void *scratch, const Attention *call, ptrdiff_t count) {
    ptrdiff_t head_dim = call->heads.head_dim;
    Scratch parts = {.keys = scratch};
    parts.values = (bf16 *)(parts.keys + RUNS * head_dim / 2);
    parts.scores = (float *)(parts.values + SPAN * WIDTH);
    parts.sums = parts.scores + count * call->stride;
    parts.queries = (bf16 *)(parts.sums + count * head_dim);
    parts.high = parts.queries + count * head_dim;
    parts.low = parts.high + count * call->stride;
    return parts;
}

size_t tile_scratch_bytes(const Attention *call, ptrdiff_t count) {
    return (char *)(parts_of(NULL, call, count).low + count * call->stride) - (char *)NULL;
}

INLINE void score(float *to, const bf16 *queries, const u32v *keys, int runs, const Attention *call) {
    ptrdiff_t head_dim = call->heads.head_dim, stride = call->stride * sizeof *to;
    _tile_zero(UPPER_LEFT);
    _tile_zero(UPPER_RIGHT);
    for (ptrdiff_t first = 0; first < head_dim; first += TILE_INPUTS) {
        _tile_loadd(UPPER, queries + first, head_dim * sizeof *queries);
        _tile_loadd(LEFT, keys + first / 2, sizeof *keys);
        _tile_dpbf16ps(UPPER_LEFT, UPPER, LEFT);
        if (runs == RUNS) {
            _tile_loadd(RIGHT, keys + head_dim / 2 + first / 2, sizeof *keys);
            _tile_dpbf16ps(UPPER_RIGHT, UPPER, RIGHT);
        }
    }
    _tile_stored(UPPER_LEFT, to, stride);
    if (runs == RUNS) _tile_stored(UPPER_RIGHT, to + LANES, stride);
}

INLINE void split(bf16 *high, bf16 *low, const float *weights, ptrdiff_t count) {
    for (ptrdiff_t i = 0; i < count; i += LANES) {
        f32v weight = load(weights + i);
        store_bf16(high + i, weight);
        store_bf16(low + i, weight - load_bf16(high + i));
    }
}

INLINE u16w interleaved(u16w one, u16w other, u16w places) {
    return (u16w)_mm512_permutex2var_epi16((__m512i)one, (__m512i)places, (__m512i)other);
}

// Of the values of two runs, `width` dimensions to pairs of positions [SPAN / 2, WIDTH, 2].
INLINE void interleave(bf16 *to, const bf16 *first, const bf16 *second, ptrdiff_t width, ptrdiff_t head_dim) {
    const u16w low = {0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39, 8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13,
        45, 14, 46, 15, 47};
    for (ptrdiff_t pair = 0; pair < SPAN / 2; pair++) {
        const bf16 *even = pair < LANES / 2 ? first + 2 * pair * head_dim : second + (2 * pair - LANES) * head_dim;
        for (ptrdiff_t dimension = 0; dimension < width; dimension += 2 * LANES) {
            u16w one, other;
            memcpy(&one, even + dimension, sizeof one);
            memcpy(&other, even + head_dim + dimension, sizeof other);
            u16w halves[2] = {interleaved(one, other, low), interleaved(one, other, low + LANES)};
            memcpy(to + (pair * WIDTH + dimension) * 2, halves, sizeof halves);
        }
    }
}

INLINE void store_sums(float *to, ptrdiff_t stride, ptrdiff_t width) {
    _tile_stored(UPPER_LEFT, to, stride * sizeof *to);
    _tile_stored(UPPER_RIGHT, to + LANES, stride * sizeof *to);
    if (width < WIDTH) return;
    _tile_stored(LOWER_LEFT, to + 2 * LANES, stride * sizeof *to);
    _tile_stored(LOWER_RIGHT, to + 3 * LANES, stride * sizeof *to);
}

// Sums over whole spans of positions, in their order, for `height` queries from `query` on, of which the first row sees
// `shortest` positions and the last `longest` of them: at most one span more.
static void sum_spans(const Scratch *parts, const Attention *call, const Block *block, ptrdiff_t kv_head,
    ptrdiff_t query, ptrdiff_t height, ptrdiff_t first) {
    ptrdiff_t head_dim = call->heads.head_dim, group = group_of(call);
    ptrdiff_t width = head_dim - first < WIDTH ? head_dim - first : WIDTH;
    ptrdiff_t shortest = whole_spans(block->start + 1), longest = whole_spans(block->start + block->rows);
    _tile_zero(UPPER_LEFT);
    _tile_zero(UPPER_RIGHT);
    _tile_zero(LOWER_LEFT);
    _tile_zero(LOWER_RIGHT);
    for (ptrdiff_t span = 0; span < longest; span += SPAN) {
        if (span == shortest) store_sums(parts->sums + query * head_dim + first, head_dim, width);
        interleave(parts->values, (const bf16 *)kv_at(call, block, 1, span, kv_head) + first,
            (const bf16 *)kv_at(call, block, 1, span + LANES, kv_head) + first, width, head_dim);
        ptrdiff_t stride = call->stride * sizeof(bf16), values_stride = 2 * WIDTH * sizeof(bf16);
        _tile_loadd(UPPER, parts->high + query * call->stride + span, stride);
        _tile_loadd(LOWER, parts->low + query * call->stride + span, stride);
        _tile_loadd(LEFT, parts->values, values_stride);
        _tile_loadd(RIGHT, parts->values + 2 * LANES, values_stride);
        _tile_dpbf16ps(UPPER_LEFT, UPPER, LEFT);
        _tile_dpbf16ps(UPPER_RIGHT, UPPER, RIGHT);
        _tile_dpbf16ps(UPPER_LEFT, LOWER, LEFT);
        _tile_dpbf16ps(UPPER_RIGHT, LOWER, RIGHT);
        if (width < WIDTH) continue;
        _tile_loadd(LEFT, parts->values + 4 * LANES, values_stride);
        _tile_loadd(RIGHT, parts->values + 6 * LANES, values_stride);
        _tile_dpbf16ps(LOWER_LEFT, UPPER, LEFT);
        _tile_dpbf16ps(LOWER_RIGHT, UPPER, RIGHT);
        _tile_dpbf16ps(LOWER_LEFT, LOWER, LEFT);
        _tile_dpbf16ps(LOWER_RIGHT, LOWER, RIGHT);
    }
    // What was stored before the last span is right for rows that do not see it.
    float all[TILE_ROWS][WIDTH] __attribute__((aligned(64)));
    store_sums(all[0], WIDTH, width);
    for (ptrdiff_t row = 0; row < height; row++)
        if (whole_spans(block->start + (query + row) / group + 1) == longest)
            memcpy(parts->sums + (query + row) * head_dim + first, all[row], width * sizeof(float));
}

// As attend_block of attention.c without windows and codes, but for the order of sums: scores a tile of dimensions at a time; outputs a span of
// positions at a time, weights in two parts, then the positions that are left over.
void tile_attend_block(const Attention *call, const Block *block, ptrdiff_t kv_head, void *scratch) {
    ptrdiff_t head_dim = call->heads.head_dim, stride = call->stride, group = group_of(call);
    ptrdiff_t count = block->rows * group, last = block->start + block->rows;
    // All parts of the queries have one height, as in tile_linear.
    ptrdiff_t tiles = (count + TILE_ROWS - 1) / TILE_ROWS, height = (count + tiles - 1) / tiles;
    Scratch parts = parts_of(scratch, call, count);
    TileShapes shapes = tile_shapes(height, height);
    gather_queries((factor *)parts.queries, call, block, kv_head);
    _tile_loadconfig(&shapes);
    for (ptrdiff_t position = 0; position < last; position += RUNS * LANES) {
        int runs = take_keys(parts.keys, call, block, kv_head, position);
        for (ptrdiff_t tile = 0; tile < tiles; tile++) {
            ptrdiff_t query = tile * height < count - height ? tile * height : count - height;
            score(parts.scores + query * stride + position, parts.queries + query * head_dim, parts.keys, runs, call);
        }
    }
    for (ptrdiff_t query = 0; query < count; query++) {
        ptrdiff_t seen = block->start + query / group + 1;
        float *weights = parts.scores + query * stride;
        softmax(weights, call, seen - 1, kv_head * group + query % group);
        split(parts.high + query * stride, parts.low + query * stride, weights, whole_spans(seen));
    }
    for (ptrdiff_t first = 0; first < head_dim; first += WIDTH)
        for (ptrdiff_t tile = 0; tile < tiles; tile++) {
            ptrdiff_t query = tile * height < count - height ? tile * height : count - height;
            sum_spans(&parts, call, block, kv_head, query, height, first);
        }
    _tile_release();
    for (ptrdiff_t row = 0; row < block->rows; row++)
        sum_row_values(call, block, kv_head, row, parts.scores + row * group * stride,
            parts.sums + row * group * head_dim, whole_spans(block->start + row + 1));
}

#endif
