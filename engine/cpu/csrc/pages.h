// KV pages: pool [2, pages, kv_heads], keys before values, of what a page holds of a head: elements [page_size, head_dim],
// or, of `quantized` KV, codes [page_size, head_dim] of 8 bits and then float32 scales [page_size]. A code times its
// position's scale is a number.

#pragma once

#include <float.h>

#include "element.h"

typedef struct {
    ptrdiff_t query_heads, kv_heads, head_dim, page_size, pages, quantized;
} Heads;

INLINE ptrdiff_t row_bytes(const Heads *heads) {
    return heads->head_dim * (ptrdiff_t)(heads->quantized ? sizeof(int8_t) : sizeof(element));
}

INLINE char *page_of(void *pool, const Heads *heads, ptrdiff_t values, ptrdiff_t page, ptrdiff_t head) {
    assert(page >= 0 && page < heads->pages && head >= 0 && head < heads->kv_heads);
    ptrdiff_t position_bytes = row_bytes(heads) + (heads->quantized ? (ptrdiff_t)sizeof(float) : 0);
    return (char *)pool + ((values * heads->pages + page) * heads->kv_heads + head) * heads->page_size * position_bytes;
}

// A row [size] to codes; gives their scale, a 127th of the largest magnitude. Codes are rounded to nearest, ties to even.
// A row whose scale would be subnormal counts as zeros; one that is not finite has a scale that is not.
INLINE float quantize(char *to, const element *row, ptrdiff_t size) {
    i32v magnitudes = {};
    for (ptrdiff_t i = 0; i < size; i += LANES) {
        // As whole numbers, magnitudes have the same order, with NaN above all.
        i32v magnitude = (i32v)load_element(row + i) & INT32_MAX;
        i32v larger = magnitude > magnitudes;
        magnitudes = (larger & magnitude) | (~larger & magnitudes);
    }
    int32_t highest = 0;
    for (int lane = 0; lane < LANES; lane++)
        if (magnitudes[lane] > highest) highest = magnitudes[lane];
    float largest;
    memcpy(&largest, &highest, sizeof largest);
    float scale = largest / 127.0f;
    if (scale < FLT_MIN) scale = 0.0f;
    const f32v magic = splat(12582912.0f); // 1.5 * 2^23: adding it rounds to a whole number
    for (ptrdiff_t i = 0; i < size; i += LANES) {
        f32v code = load_element(row + i) / scale;
        code = blend((code < 127.5f) & (code > -127.5f), code, splat(0.0f));
        s8v codes = __builtin_convertvector(__builtin_convertvector((code + magic) - magic, i32v), s8v);
        memcpy(to + i, &codes, sizeof codes);
    }
    return scale;
}

// Writes a row [head_dim] of keys (values: 0) or values (1) of a KV head to its slot.
INLINE void write_row(void *pool, const Heads *heads, ptrdiff_t values, ptrdiff_t slot, ptrdiff_t head, const element *row) {
    char *page = page_of(pool, heads, values, slot / heads->page_size, head);
    ptrdiff_t offset = slot % heads->page_size;
    char *to = page + offset * row_bytes(heads);
    if (!heads->quantized) {
        memcpy(to, row, row_bytes(heads));
        return;
    }
    float scale = quantize(to, row, heads->head_dim);
    memcpy(page + heads->page_size * row_bytes(heads) + offset * sizeof scale, &scale, sizeof scale);
}
