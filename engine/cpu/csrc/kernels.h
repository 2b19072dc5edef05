// What the library offers; each function is described where it is defined. Functions with `linear` in them are there
// where the processor has AVX-512's products of bfloat16, or AVX2 with fused multiply-add.

#pragma once

#include "vectors.h"

#if defined __AVX512BF16__ || (defined __AVX2__ && defined __FMA__)
#define MULTIPLIES_BF16
#endif

// Outputs whose weights lie together.
#define PANEL (2 * LANES)

// Rows [first_row, first_row + rows) are the positions from start on of a sequence whose pages are listed from
// first_page on.
typedef struct {
    int64_t first_row, rows, start, first_page;
} Block;

void spool_norm(bf16 *to, const bf16 *from, const bf16 *weight, ptrdiff_t rows, ptrdiff_t hidden, float epsilon);

void spool_add_norm(
    bf16 *to, bf16 *residual, const bf16 *added, const bf16 *weight, ptrdiff_t rows, ptrdiff_t hidden, float epsilon);

void spool_add(bf16 *residual, const bf16 *added, ptrdiff_t size);

void spool_silu_mul(bf16 *to, const bf16 *gate_up, ptrdiff_t rows, ptrdiff_t inner);

void spool_rotate_write(bf16 *queries, bf16 *pool, const bf16 *qkv, const float *cos, const float *sin,
    const int64_t *slots, const bf16 *query_norm, const bf16 *key_norm, float epsilon, ptrdiff_t rows,
    ptrdiff_t query_heads, ptrdiff_t kv_heads, ptrdiff_t head_dim, ptrdiff_t page_size, ptrdiff_t pages);

void spool_argmax(
    int64_t *places, float *values, const bf16 *scores, ptrdiff_t rows, ptrdiff_t stride, ptrdiff_t size);

void spool_probabilities(
    float *to, const bf16 *scores, const int64_t *places, ptrdiff_t rows, ptrdiff_t stride, ptrdiff_t size);

int spool_attend(bf16 *to, const bf16 *queries, bf16 *pool, const int64_t *pages, const Block *blocks,
    ptrdiff_t block_count, ptrdiff_t max_rows, ptrdiff_t longest, float scaling, ptrdiff_t query_heads,
    ptrdiff_t kv_heads, ptrdiff_t head_dim, ptrdiff_t page_size, ptrdiff_t page_count);

int spool_has_tiles(void);

#ifdef MULTIPLIES_BF16
// A row's outputs of one panel, of which `columns` are there.
INLINE void store_outputs(bf16 *to, f32v left, f32v right, ptrdiff_t columns) {
    bf16 outputs[PANEL];
#ifdef __AVX512BF16__
    _mm512_storeu_si512(outputs, (__m512i)_mm512_cvtne2ps_pbh((__m512)right, (__m512)left));
#else
    store_bf16(outputs, left);
    store_bf16(outputs + LANES, right);
#endif
    if (columns == PANEL)
        memcpy(to, outputs, sizeof outputs);
    else
        memcpy(to, outputs, columns * sizeof *to);
}

void spool_linear(
    bf16 *to, const bf16 *rows, const bf16 *weights, const float *bias, ptrdiff_t count, ptrdiff_t in, ptrdiff_t out);
#endif
