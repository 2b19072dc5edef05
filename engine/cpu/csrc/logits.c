// Scans of rows of logits after a pass.

#include <stdbool.h>

#include "kernels.h"

// Rows are shared out among threads where there is enough in them to pay for it.
#define SHARED_OUT (rows > 1 && rows * size >= 1 << 16)

#define CHUNK 512

// Whole numbers in the order of the numbers; -0 comes right before 0.
INLINE int16_t ordered(bf16 x) { return (int16_t)(x ^ (((int16_t)x >> 15) & 0x7fff)); }

INLINE bool same(bf16 x, bf16 y) { return x == y || !((x | y) & 0x7fff); }

// The largest of `size` numbers; NaN where one of them is.
INLINE float largest_of(const bf16 *scores, ptrdiff_t size) {
    int16_t highest = INT16_MIN, magnitude = 0;
    for (ptrdiff_t i = 0; i < size; i++) {
        int16_t place = ordered(scores[i]), bits = scores[i] & 0x7fff;
        highest = place > highest ? place : highest;
        magnitude = bits > magnitude ? bits : magnitude;
    }
    return magnitude > 0x7f80 ? NAN : to_float((bf16)ordered((bf16)highest));
}

// The first place of a number; 0 if it does not occur.
INLINE int64_t first_place(const bf16 *scores, ptrdiff_t size, bf16 value) {
    for (ptrdiff_t chunk = 0; chunk < size; chunk += CHUNK) {
        ptrdiff_t end = chunk + CHUNK < size ? chunk + CHUNK : size;
        int16_t any = 0;
        for (ptrdiff_t i = chunk; i < end; i++) any |= same(scores[i], value);
        for (ptrdiff_t i = chunk; any && i < end; i++)
            if (same(scores[i], value)) return i;
    }
    return 0;
}

// Of each of `rows` rows of `size` numbers, `stride` apart, the largest number and its first place. A row that holds
// NaN has NaN, and any place.
void spool_argmax(
    int64_t *places, float *values, const bf16 *scores, ptrdiff_t rows, ptrdiff_t stride, ptrdiff_t size) {
#pragma omp parallel for schedule(static) if (SHARED_OUT)
    for (ptrdiff_t row = 0; row < rows; row++) {
        const bf16 *of = scores + row * stride;
        values[row] = largest_of(of, size);
        places[row] = first_place(of, size, to_bf16(values[row]));
    }
}

// The softmax of each of `rows` rows of `size` numbers, `stride` apart, at one place of each.
void spool_probabilities(float *to, const bf16 *scores, const int64_t *places, ptrdiff_t rows, ptrdiff_t stride,
    ptrdiff_t size) {
#pragma omp parallel for schedule(static) if (SHARED_OUT)
    for (ptrdiff_t row = 0; row < rows; row++) {
        const bf16 *of = scores + row * stride;
        ptrdiff_t whole = size - size % LANES;
        float highest = largest_of(of, size);
        f32v sums = splat(0.0f);
        for (ptrdiff_t i = 0; i < whole; i += LANES) sums = sums + exponential(load_bf16(of + i) - highest);
        float total = sum(sums);
        for (ptrdiff_t i = whole; i < size; i++) total += expf(to_float(of[i]) - highest);
        to[row] = expf(to_float(of[places[row]]) - highest) / total;
    }
}
