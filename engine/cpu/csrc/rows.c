// What happens to each row between the linear layers of a decoder layer, but for attention.

#include "kernels.h"
#include "pages.h"

// Threads that the calling thread's next parallel part would run on.
int spool_threads(void) { return omp_get_max_threads(); }

// Lets them run on so many from now on.
void spool_use_threads(int count) { omp_set_num_threads(count); }

// Fewer rows take less time than threads take to begin.
#define SHARED_ROWS 16

// `to` may be `from`.
INLINE void normalize(element *to, const element *from, const Norm *norm, ptrdiff_t size) {
    f32v sums[PARTS] = {}, squares[PARTS] = {};
    if (norm->centred)
        for (ptrdiff_t i = 0; i < size; i += SUM_LANES)
#pragma GCC unroll 4
            for (int part = 0; part < PARTS; part++) sums[part] = sums[part] + load_element(from + i + part * LANES);
    f32v mean = splat(norm->centred ? sum(sums) / (float)size : 0.0f);
    for (ptrdiff_t i = 0; i < size; i += SUM_LANES)
#pragma GCC unroll 4
        for (int part = 0; part < PARTS; part++) {
            f32v x = load_element(from + i + part * LANES) - mean;
            squares[part] = multiply_add(x, x, squares[part]);
        }
    float scale = 1.0f / sqrtf(sum(squares) / (float)size + norm->epsilon);
    for (ptrdiff_t i = 0; i < size; i += LANES) {
        f32v x = (load_element(from + i) - mean) * scale * load(norm->weight + i);
        store_element(to + i, norm->bias ? x + load(norm->bias + i) : x);
    }
}

INLINE void normalize_or_copy(element *to, const element *from, const Norm *norm, ptrdiff_t size) {
    if (norm->weight) normalize(to, from, norm, size);
    else memcpy(to, from, size * sizeof *to);
}

// rows [rows, hidden] to their norms.
void team_norm(const Team *team, element *to, const element *from, const Norm *norm, ptrdiff_t rows, ptrdiff_t hidden) {
    for (SHARED(row, team, rows)) normalize_or_copy(to + row * hidden, from + row * hidden, norm, hidden);
    wait_for_team(team);
}

void spool_norm(element *to, const element *from, const Norm *norm, ptrdiff_t rows, ptrdiff_t hidden) {
    WITH_TEAM(rows >= SHARED_ROWS, team_norm(team, to, from, norm, rows, hidden));
}

// Adds the norm of `added`, times `multiplier`, to `residual` in place. `normed`, where it is given, becomes the norm of
// the sums; of a `parallel` layer that of the residual before, or it stays what it is if there is no such norm. Changes
// `added`.
void team_add(const Team *team, element *residual, element *added, const Norm *post_norm, float multiplier,
    element *normed, const Norm *norm, ptrdiff_t parallel, ptrdiff_t rows, ptrdiff_t hidden) {
    for (SHARED(row, team, rows)) {
        element *sums = residual + row * hidden, *more = added + row * hidden, *to = normed + row * hidden;
        if (normed && parallel && norm->weight) normalize(to, sums, norm, hidden);
        if (post_norm->weight) normalize(more, more, post_norm, hidden);
        for (ptrdiff_t i = 0; i < hidden; i += LANES)
            store_element(sums + i, multiply_add(load_element(more + i), splat(multiplier), load_element(sums + i)));
        if (normed && !parallel) normalize_or_copy(to, sums, norm, hidden);
    }
    wait_for_team(team);
}

void spool_add(element *residual, element *added, const Norm *post_norm, float multiplier, ptrdiff_t rows,
    ptrdiff_t hidden) {
    const Norm none = {0};
    WITH_TEAM(rows >= SHARED_ROWS,
        team_add(team, residual, added, post_norm, multiplier, NULL, &none, 0, rows, hidden));
}

// 1 / (1 + e^-x), by e^-|x|, which neither overflows nor loses the sign's side.
INLINE f32v sigmoid(f32v x) {
    f32v small = exponential(blend(x < 0.0f, x, -x));
    return blend(x < 0.0f, small, splat(1.0f)) / (1.0f + small);
}

// The share of a normal distribution below x: for negative x, half of the complementary error function of -x / sqrt(2),
// by formula 7.1.26 of Abramowitz and Stegun, within 1e-7.
INLINE f32v normal_share(f32v x) {
    f32v positive = blend(x < 0.0f, -x, x), t = 1.0f / multiply_add(positive, splat(0.2316418935f), splat(1.0f));
    f32v series = splat(1.061405429f);
    series = multiply_add(series, t, splat(-1.453152027f));
    series = multiply_add(series, t, splat(1.421413741f));
    series = multiply_add(series, t, splat(-0.284496736f));
    series = multiply_add(series, t, splat(0.254829592f));
    f32v above = series * t * exponential(x * x * -0.5f) * 0.5f;
    return blend(x < 0.0f, above, 1.0f - above);
}

INLINE f32v activated(f32v x, ptrdiff_t activation) {
    f32v positive = blend(x < 0.0f, splat(0.0f), x);
    switch (activation) {
    case SILU: return x * sigmoid(x);
    case GELU: return x * normal_share(x);
    // 1 + tanh(y) is twice the sigmoid of 2 y.
    case GELU_TANH: return x * sigmoid(x * multiply_add(x * x, splat(0.0713548162726f), splat(1.59576912160573f)));
    case RELU: return positive;
    default: return positive * positive;
    }
}

// The same with what `activation` is known to the compiler.
INLINE void activate(const Team *team, element *to, const element *up, ptrdiff_t rows, ptrdiff_t inner,
    ptrdiff_t activation, ptrdiff_t gated) {
    for (ptrdiff_t row = 0; row < rows; row++) {
        const element *gate = up + row * (gated ? 2 : 1) * inner;
        for (SHARED(i, team, inner / LANES)) {
            f32v x = activated(load_element(gate + i * LANES), activation);
            store_element(to + row * inner + i * LANES, gated ? x * load_element(gate + inner + i * LANES) : x);
        }
    }
}

// up [rows, inner] to activation(up); if `gated`, [rows, 2 * inner], gates first, to activation(gate) * up. [rows, inner].
void team_activate(const Team *team, element *to, const element *up, ptrdiff_t rows, ptrdiff_t inner,
    ptrdiff_t activation, ptrdiff_t gated) {
    switch (activation) {
    case SILU: activate(team, to, up, rows, inner, SILU, gated); break;
    case GELU: activate(team, to, up, rows, inner, GELU, gated); break;
    case GELU_TANH: activate(team, to, up, rows, inner, GELU_TANH, gated); break;
    case RELU: activate(team, to, up, rows, inner, RELU, gated); break;
    default: activate(team, to, up, rows, inner, RELU_SQUARED, gated);
    }
    wait_for_team(team);
}

void spool_activate(
    element *to, const element *up, ptrdiff_t rows, ptrdiff_t inner, ptrdiff_t activation, ptrdiff_t gated) {
    WITH_TEAM(rows >= SHARED_ROWS, team_activate(team, to, up, rows, inner, activation, gated));
}

// Logits of one size, a multiple of LANES, times `multiplier`, and then, if `cap` is above 0, cap * tanh(logit / cap), in
// place.
void spool_cap(element *logits, ptrdiff_t size, float multiplier, float cap) {
#pragma omp parallel for
    for (ptrdiff_t i = 0; i < size / LANES; i++) {
        f32v x = load_element(logits + i * LANES) * multiplier;
        store_element(logits + i * LANES, cap > 0 ? cap * hyperbolic_tangent(x / cap) : x);
    }
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
// of sin negated. Queries and keys are normalized where there are norms for them, which changes qkv.
void team_rotate_write(const Team *team, element *queries, void *pool, element *qkv, const float *cos,
    const float *sin, const int64_t *slots, const HeadNorms *norms, ptrdiff_t rows, ptrdiff_t query_heads,
    ptrdiff_t kv_heads, ptrdiff_t head_dim, ptrdiff_t page_size, ptrdiff_t pages, ptrdiff_t quantized) {
    const Heads shape = {query_heads, kv_heads, head_dim, page_size, pages, quantized}, *heads = &shape;
    int has_norms = norms->queries.weight != NULL;
    for (SHARED(row, team, rows)) {
        element *from = qkv + row * (query_heads + 2 * kv_heads) * head_dim;
        const float *row_cos = cos + row * head_dim, *row_sin = sin + row * head_dim;
        assert(slots[row] >= 0 && slots[row] < pages * page_size);
        element key[head_dim];
        if (has_norms && norms->whole) {
            normalize(from, from, &norms->queries, query_heads * head_dim);
            normalize(from + query_heads * head_dim, from + query_heads * head_dim, &norms->keys, kv_heads * head_dim);
        }
        for (ptrdiff_t head = 0; head < query_heads + kv_heads; head++, from += head_dim) {
            int is_query = head < query_heads;
            ptrdiff_t first = (is_query ? head : head - query_heads) * head_dim;
            Norm norm = is_query ? norms->queries : norms->keys;
            if (norm.weight) norm.weight += first;
            if (norm.bias) norm.bias += first;
            element *to = is_query ? queries + (row * query_heads + head) * head_dim : key;
            if (has_norms && !norms->whole && !norms->after) normalize(from, from, &norm, head_dim);
            rotate(to, from, row_cos, row_sin, head_dim);
            if (has_norms && norms->after) normalize(to, to, &norm, head_dim);
            if (!is_query) write_row(pool, heads, 0, slots[row], head - query_heads, key);
        }
        for (ptrdiff_t head = 0; head < kv_heads; head++, from += head_dim)
            write_row(pool, heads, 1, slots[row], head, from);
    }
    wait_for_team(team);
}

void spool_rotate_write(element *queries, void *pool, element *qkv, const float *cos, const float *sin,
    const int64_t *slots, const HeadNorms *norms, ptrdiff_t rows, ptrdiff_t query_heads, ptrdiff_t kv_heads,
    ptrdiff_t head_dim, ptrdiff_t page_size, ptrdiff_t pages, ptrdiff_t quantized) {
    WITH_TEAM(rows >= SHARED_ROWS, team_rotate_write(team, queries, pool, qkv, cos, sin, slots, norms, rows,
        query_heads, kv_heads, head_dim, page_size, pages, quantized));
}
