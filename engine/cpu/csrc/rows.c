// What happens to each row between the linear layers of a decoder layer, but for attention.

#include "kernels.h"
#include "pages.h"

// Threads that the calling thread's next parallel part would run on.
int spool_threads(void) { return omp_get_max_threads(); }

// Lets them run on so many from now on.
void spool_use_threads(int count) { omp_set_num_threads(count); }

// Fewer rows take less time than threads take to begin.
#define SHARED_ROWS 16

INLINE void normalize(element *to, const element *from, const element *weight, ptrdiff_t size, float epsilon) {
    f32v squares[PARTS] = {};
    for (ptrdiff_t i = 0; i < size; i += SUM_LANES)
#pragma GCC unroll 4
        for (int part = 0; part < PARTS; part++) {
            f32v x = load_element(from + i + part * LANES);
            squares[part] = multiply_add(x, x, squares[part]);
        }
    float scale = 1.0f / sqrtf(sum(squares) / (float)size + epsilon);
    for (ptrdiff_t i = 0; i < size; i += LANES) store_element(to + i, load_element(from + i) * scale * load_element(weight + i));
}

// rows [rows, hidden] to their root-mean-square norms.
void team_norm(const Team *team, element *to, const element *from, const element *weight, ptrdiff_t rows,
    ptrdiff_t hidden, float epsilon) {
    for (SHARED(row, team, rows)) normalize(to + row * hidden, from + row * hidden, weight, hidden, epsilon);
    wait_for_team(team);
}

void spool_norm(element *to, const element *from, const element *weight, ptrdiff_t rows, ptrdiff_t hidden, float epsilon) {
    WITH_TEAM(rows >= SHARED_ROWS, team_norm(team, to, from, weight, rows, hidden, epsilon));
}

// Adds `added` to `residual` in place, and gives the norms of the sums.
void team_add_norm(const Team *team, element *to, element *residual, const element *added, const element *weight,
    ptrdiff_t rows, ptrdiff_t hidden, float epsilon) {
    for (SHARED(row, team, rows)) {
        element *sums = residual + row * hidden;
        for (ptrdiff_t i = 0; i < hidden; i += LANES)
            store_element(sums + i, load_element(sums + i) + load_element(added + row * hidden + i));
        normalize(to + row * hidden, sums, weight, hidden, epsilon);
    }
    wait_for_team(team);
}

void spool_add_norm(
    element *to, element *residual, const element *added, const element *weight, ptrdiff_t rows, ptrdiff_t hidden, float epsilon) {
    WITH_TEAM(rows >= SHARED_ROWS, team_add_norm(team, to, residual, added, weight, rows, hidden, epsilon));
}

// Adds `added` to `residual`, both of `size`, in place.
void team_add(const Team *team, element *residual, const element *added, ptrdiff_t size) {
    for (SHARED(i, team, size / LANES)) {
        element *to = residual + i * LANES;
        store_element(to, load_element(to) + load_element(added + i * LANES));
    }
    wait_for_team(team);
}

// gate_up [rows, 2 * inner] to silu(gate) * up, [rows, inner].
void team_silu_mul(const Team *team, element *to, const element *gate_up, ptrdiff_t rows, ptrdiff_t inner) {
    for (ptrdiff_t row = 0; row < rows; row++) {
        const element *gate = gate_up + row * 2 * inner, *up = gate + inner;
        for (SHARED(i, team, inner / LANES)) {
            f32v x = load_element(gate + i * LANES);
            // By e^-|x|, which neither overflows nor loses the sign's side.
            f32v small = exponential(blend(x < 0.0f, x, -x));
            f32v sigmoid = blend(x < 0.0f, small, splat(1.0f)) / (1.0f + small);
            store_element(to + row * inner + i * LANES, x * sigmoid * load_element(up + i * LANES));
        }
    }
    wait_for_team(team);
}

void spool_silu_mul(element *to, const element *gate_up, ptrdiff_t rows, ptrdiff_t inner) {
    WITH_TEAM(rows >= SHARED_ROWS, team_silu_mul(team, to, gate_up, rows, inner));
}

INLINE void rotate(element *to, const element *from, const float *cos, const float *sin, ptrdiff_t head_dim) {
    ptrdiff_t half = head_dim / 2;
    for (ptrdiff_t i = 0; i < half; i += LANES) {
        f32v first = load_element(from + i), second = load_element(from + half + i);
        store_element(to + i, multiply_add(first, load(cos + i), second * load(sin + i)));
        store_element(to + half + i, multiply_add(second, load(cos + half + i), first * load(sin + half + i)));
    }
}

// qkv [rows, (query_heads + 2 * kv_heads) * head_dim]: queries are rotated by halves to [rows, query_heads, head_dim];
// keys, rotated, and values go to the slots [rows] of a pool (pages.h). cos and sin are [rows, head_dim], the first half
// of sin negated. Where the norms' weights [head_dim] are given, queries and keys are normalized before.
void team_rotate_write(const Team *team, element *queries, void *pool, const element *qkv, const float *cos,
    const float *sin, const int64_t *slots, const element *query_norm, const element *key_norm, float epsilon,
    ptrdiff_t rows, ptrdiff_t query_heads, ptrdiff_t kv_heads, ptrdiff_t head_dim, ptrdiff_t page_size, ptrdiff_t pages,
    ptrdiff_t quantized) {
    const Heads shape = {query_heads, kv_heads, head_dim, page_size, pages, quantized}, *heads = &shape;
    for (SHARED(row, team, rows)) {
        const element *from = qkv + row * (query_heads + 2 * kv_heads) * head_dim;
        const float *row_cos = cos + row * head_dim, *row_sin = sin + row * head_dim;
        assert(slots[row] >= 0 && slots[row] < pages * page_size);
        element normalized[head_dim], key[head_dim];
        for (ptrdiff_t head = 0; head < query_heads + kv_heads; head++, from += head_dim) {
            const element *source = from, *norm = head < query_heads ? query_norm : key_norm;
            if (norm) {
                normalize(normalized, from, norm, head_dim, epsilon);
                source = normalized;
            }
            element *to = head < query_heads ? queries + (row * query_heads + head) * head_dim : key;
            rotate(to, source, row_cos, row_sin, head_dim);
            if (to == key) write_row(pool, heads, 0, slots[row], head - query_heads, key);
        }
        for (ptrdiff_t head = 0; head < kv_heads; head++, from += head_dim)
            write_row(pool, heads, 1, slots[row], head, from);
    }
    wait_for_team(team);
}

void spool_rotate_write(element *queries, void *pool, const element *qkv, const float *cos, const float *sin,
    const int64_t *slots, const element *query_norm, const element *key_norm, float epsilon, ptrdiff_t rows,
    ptrdiff_t query_heads, ptrdiff_t kv_heads, ptrdiff_t head_dim, ptrdiff_t page_size, ptrdiff_t pages,
    ptrdiff_t quantized) {
    WITH_TEAM(rows >= SHARED_ROWS, team_rotate_write(team, queries, pool, qkv, cos, sin, slots, query_norm, key_norm,
        epsilon, rows, query_heads, kv_heads, head_dim, page_size, pages, quantized));
}
