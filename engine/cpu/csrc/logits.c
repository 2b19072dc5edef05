// Scans of rows of logits after a pass.

#include "kernels.h"

// Rows are shared out among threads where there is enough in them to pay for it.
#define SHARED_OUT (rows > 1 && rows * size >= 1 << 16)

// Vectors between two looks at whether the place was among them.
#define CHUNK (32 * LANES)

// LANES numbers from `from` on, of which the first `count` are there; those past them are -infinity.
INLINE f32v load_some(const element *from, ptrdiff_t count) {
    if (count >= LANES) return load_element(from);
    element numbers[LANES];
    for (int lane = 0; lane < LANES; lane++) numbers[lane] = LOWEST;
    memcpy(numbers, from, count * sizeof *from);
    return load_element(numbers);
}

INLINE int any(i32v condition) {
    int32_t lanes[LANES], all = 0;
    memcpy(lanes, &condition, sizeof lanes);
    for (int lane = 0; lane < LANES; lane++) all |= lanes[lane];
    return all != 0;
}

// The largest of `size` numbers; NaN where one of them is.
INLINE float largest_of(const element *scores, ptrdiff_t size) {
    f32v highest = splat(-INFINITY);
    i32v bad = {};
    for (ptrdiff_t i = 0; i < size; i += LANES) {
        f32v x = load_some(scores + i, size - i);
        highest = blend(highest < x, x, highest);
        bad |= x != x;
    }
    return any(bad) ? NAN : largest(highest);
}

// The first place of a number; 0 if it does not occur. -0 and 0 are the same.
INLINE int64_t first_place(const element *scores, ptrdiff_t size, float value) {
    for (ptrdiff_t chunk = 0; chunk < size; chunk += CHUNK) {
        ptrdiff_t end = chunk + CHUNK < size ? chunk + CHUNK : size;
        i32v found = {};
        for (ptrdiff_t i = chunk; i < end; i += LANES) found |= load_some(scores + i, size - i) == value;
        if (!any(found)) continue;
        for (ptrdiff_t i = chunk; i < end; i += LANES) {
            float lanes[LANES];
            store(lanes, load_some(scores + i, size - i));
            for (ptrdiff_t lane = 0; lane < LANES && i + lane < size; lane++)
                if (lanes[lane] == value) return i + lane;
        }
    }
    return 0;
}

// Of each of `rows` rows of `size` numbers, `stride` apart, the largest number and its first place. A row that holds
// NaN has NaN, and any place.
void spool_argmax(
    int64_t *places, float *values, const element *scores, ptrdiff_t rows, ptrdiff_t stride, ptrdiff_t size) {
#pragma omp parallel for schedule(static) if (SHARED_OUT)
    for (ptrdiff_t row = 0; row < rows; row++) {
        const element *of = scores + row * stride;
        values[row] = largest_of(of, size);
        places[row] = first_place(of, size, values[row]);
    }
}

// The softmax of each of `rows` rows of `size` numbers, `stride` apart, at one place of each.
void spool_probabilities(float *to, const element *scores, const int64_t *places, ptrdiff_t rows, ptrdiff_t stride,
    ptrdiff_t size) {
#pragma omp parallel for schedule(static) if (SHARED_OUT)
    for (ptrdiff_t row = 0; row < rows; row++) {
        assert(places[row] >= 0 && places[row] < size);
        const element *of = scores + row * stride;
        float highest = largest_of(of, size);
        f32v sums = splat(0.0f);
        for (ptrdiff_t i = 0; i < size; i += LANES)
            sums = sums + exponential(load_some(of + i, size - i) - highest);
        float shares[LANES];
        store(shares, exponential(load_some(of + places[row], 1) - highest));
        to[row] = shares[0] / sum(sums);
    }
}
