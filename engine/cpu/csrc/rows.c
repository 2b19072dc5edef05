// What happens to each row between the linear layers of a decoder layer, but for attention.

#include <omp.h>

#include "kernels.h"
#include "pages.h"

// Threads that the calling thread's next parallel part would run on.
int spool_threads(void) { return omp_get_max_threads(); }

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
    for (ptrdiff_t row = 0; row < rows; row++)
        normalize(to + row * hidden, from + row * hidden, weight, hidden, epsilon);
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

// Adds `added` to `residual`, both of `size`, in place.
void spool_add(bf16 *residual, const bf16 *added, ptrdiff_t size) {
#pragma omp parallel for schedule(static) if (size >= 1 << 14)
    for (ptrdiff_t i = 0; i < size; i += LANES)
        store_bf16(residual + i, load_bf16(residual + i) + load_bf16(added + i));
}

// gate_up [rows, 2 * inner] to silu(gate) * up, [rows, inner].
void spool_silu_mul(bf16 *to, const bf16 *gate_up, ptrdiff_t rows, ptrdiff_t inner) {
#pragma omp parallel for schedule(static) if (rows >= 8)
    for (ptrdiff_t row = 0; row < rows; row++) {
        const bf16 *gate = gate_up + row * 2 * inner, *up = gate + inner;
        for (ptrdiff_t i = 0; i < inner; i += LANES) {
            f32v x = load_bf16(gate + i);
            // By e^-|x|, which neither overflows nor loses the sign's side.
            f32v small = exponential(blend(x < 0.0f, x, -x));
            f32v sigmoid = blend(x < 0.0f, small, splat(1.0f)) / (1.0f + small);
            store_bf16(to + row * inner + i, x * sigmoid * load_bf16(up + i));
        }
    }
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
// [rows, head_dim], the first half of sin negated. Where the norms' weights [head_dim] are given, queries and keys are
// normalized before.
void spool_rotate_write(bf16 *queries, bf16 *pool, const bf16 *qkv, const float *cos, const float *sin,
    const int64_t *slots, const bf16 *query_norm, const bf16 *key_norm, float epsilon, ptrdiff_t rows,
    ptrdiff_t query_heads, ptrdiff_t kv_heads, ptrdiff_t head_dim, ptrdiff_t page_size, ptrdiff_t pages) {
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
            bf16 *to = head < query_heads ? queries + (row * query_heads + head) * head_dim
                                          : page_of(pool, heads, 0, page, head - query_heads) + offset * head_dim;
            rotate(to, source, row_cos, row_sin, head_dim);
        }
        for (ptrdiff_t head = 0; head < kv_heads; head++, from += head_dim)
            memcpy(page_of(pool, heads, 1, page, head) + offset * head_dim, from, head_dim * sizeof *from);
    }
}
