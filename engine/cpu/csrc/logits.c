// Scans of rows of logits after a pass, and what is forbidden in them.

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

// The bits of 64 numbers; whether all of them have one, or none, is the same in any order.
INLINE uint64_t bits_of_64(const uint8_t *allowed) {
    uint64_t bits;
    memcpy(&bits, allowed, sizeof bits);
    return bits;
}

#ifdef ELEMENT_F32
typedef uint32_t pattern;
#else
typedef uint16_t pattern;
#endif

// Of each of `rows` rows of `size` numbers, `stride` apart, the sum modulo 2^64 of the bits of each number times its
// weight.
void spool_digests(uint64_t *to, const element *scores, const uint64_t *weights, ptrdiff_t rows, ptrdiff_t stride,
    ptrdiff_t size) {
#pragma omp parallel for schedule(static) if (SHARED_OUT)
    for (ptrdiff_t row = 0; row < rows; row++) {
        const element *of = scores + row * stride;
        uint64_t sum = 0;
        for (ptrdiff_t i = 0; i < size; i++) {
            pattern bits;
            memcpy(&bits, of + i, sizeof bits);
            sum += bits * weights[i];
        }
        to[row] = sum;
    }
}

typedef pattern pattern8 __attribute__((vector_size(8 * sizeof(pattern))));

// -infinity in place of those of eight numbers that have no bit, the lowest first.
INLINE void forbid_eight(element *scores, uint8_t allowed) {
    pattern lowest;
    pattern8 x;
    memcpy(&lowest, &LOWEST, sizeof lowest);
    memcpy(&x, scores, sizeof x);
    pattern8 kept = (pattern8)((((pattern)allowed - (pattern8){}) & (pattern8){1, 2, 4, 8, 16, 32, 64, 128}) != 0);
    x = (x & kept) | (lowest & ~kept);
    memcpy(scores, &x, sizeof x);
}

// -infinity in place of those of `size` numbers that have no bit, the lowest bit of a byte first.
INLINE void forbid_row(element *scores, const uint8_t *allowed, ptrdiff_t size) {
    ptrdiff_t i = 0;
    for (; i + 64 <= size; i += 64) {
        uint64_t bits = bits_of_64(allowed + i / 8);
        if (bits == ~(uint64_t)0) continue;
        if (bits == 0) {
            for (int lane = 0; lane < 64; lane++) scores[i + lane] = LOWEST;
            continue;
        }
        for (int byte = 0; byte < 8; byte++) forbid_eight(scores + i + 8 * byte, allowed[i / 8 + byte]);
    }
    for (; i < size; i++)
        if (!(allowed[i / 8] >> i % 8 & 1)) scores[i] = LOWEST;
}

// As forbid_row, where the token of each number has the bit. Without branches, which nothing could foresee.
INLINE void forbid_tokens(element *scores, const uint8_t *allowed, const int64_t *tokens, ptrdiff_t size) {
    pattern lowest, x;
    memcpy(&lowest, &LOWEST, sizeof lowest);
    for (ptrdiff_t i = 0; i < size; i++) {
        pattern kept = -(pattern)(allowed[tokens[i] >> 3] >> (tokens[i] & 7) & 1);
        memcpy(&x, scores + i, sizeof x);
        x = (x & kept) | (lowest & ~kept);
        memcpy(scores + i, &x, sizeof x);
    }
}

// For each of `rows` rows of `bytes` bytes: -infinity in place of the numbers that have no bit there, in the row of
// `size` numbers, `stride` apart from the next, that is the `which`-th. The bit of a number is that of its place, or,
// with `tokens`, of its token.
void spool_forbid(element *scores, const int64_t *which, const uint8_t *allowed, const int64_t *tokens, ptrdiff_t rows,
    ptrdiff_t stride, ptrdiff_t size, ptrdiff_t bytes) {
#pragma omp parallel for schedule(static) if (SHARED_OUT)
    for (ptrdiff_t row = 0; row < rows; row++) {
        element *of = scores + which[row] * stride;
        if (tokens)
            forbid_tokens(of, allowed + row * bytes, tokens, size);
        else
            forbid_row(of, allowed + row * bytes, size);
    }
}
