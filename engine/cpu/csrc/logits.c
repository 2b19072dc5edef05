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

// The 64 bits of engine/sampling/noise.py.
INLINE uint64_t noise_bits(uint64_t key, uint64_t counter) {
    uint64_t bits = (counter + 1) * 0x9E3779B97F4A7C15u + key;
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9u;
    return (bits ^ bits >> 27) * 0x94D049BB133111EBu;
}

// Of some rows of `size` numbers, `stride` apart, each the `which`-th: the sum modulo 2^64 of the row's words of 8 bytes,
// counted from 0, each mixed twice. What the last word lacks is 0.
void spool_digests(
    uint64_t *to, const element *scores, const int64_t *which, ptrdiff_t rows, ptrdiff_t stride, ptrdiff_t size) {
#pragma omp parallel for schedule(static) if (SHARED_OUT)
    for (ptrdiff_t row = 0; row < rows; row++) {
        const char *of = (const char *)(scores + which[row] * stride);
        ptrdiff_t bytes = size * (ptrdiff_t)sizeof *scores, words = bytes / 8;
        uint64_t sum = 0;
        for (ptrdiff_t i = 0; i < words; i++) {
            uint64_t word;
            memcpy(&word, of + 8 * i, sizeof word);
            sum += noise_bits(noise_bits(word, i), i);
        }
        if (bytes % 8) {
            uint64_t word = 0;
            memcpy(&word, of + 8 * words, bytes % 8);
            sum += noise_bits(noise_bits(word, words), words);
        }
        to[row] = sum;
    }
}

// As engine/ieee_math.py, operation by operation.
INLINE double ieee_log(double x) {
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    double scale = (double)((int64_t)(bits >> 52) - 1022), mantissa;
    bits = (bits & 0xFFFFFFFFFFFFFu) | 0x3FE0000000000000u;
    memcpy(&mantissa, &bits, sizeof mantissa);
    if (mantissa < 0.70710678118654757) mantissa += mantissa, scale -= 1;
    double s = (mantissa - 1) / (mantissa + 1), square = s * s, series = 1.0 / 21;
    for (int k = 9; k >= 0; k--) series = series * square + 1.0 / (2 * k + 1);
    return scale * 0.69314718055994529 + (s + s) * series;
}

// Of the top 32 bits of noise.
INLINE float gumbel(uint32_t noise) { return (float)-ieee_log(-ieee_log(1.0 - (noise + 0.5) * 0x1p-32)); }

// Above the largest -log(1 - t) / t of all noise t, and of that below 1/2 (RACE_MARGIN in engine/sampling/logits_scan.py).
#define MARGIN 24.0f
#define SMALL_MARGIN 1.5f

// The place of the largest Gumbel noise - (largest - score) / temperature of `size` numbers, whose largest is finite. The
// noise of a number is that of its place, or, with `tokens`, of its token. As `_front_runners` of engine/sampling/sampler.py
// says, that is a race, in which whoever arrives later than `limit` cannot be first.
static ptrdiff_t draw_place(const element *scores, const int64_t *tokens, ptrdiff_t size, float largest, uint64_t key,
    float temperature) {
    float limit = INFINITY, best = -INFINITY;
    ptrdiff_t place = 0;
    for (ptrdiff_t chunk = 0; chunk < size; chunk += CHUNK) {
        ptrdiff_t end = chunk + CHUNK < size ? chunk + CHUNK : size;
        uint32_t noise[CHUNK];
        if (tokens)
            for (ptrdiff_t i = chunk; i < end; i++) noise[i - chunk] = noise_bits(key, tokens[i]) >> 32;
        else
            for (ptrdiff_t i = 0; i < CHUNK; i++) noise[i] = noise_bits(key, chunk + i) >> 32;
        float arrivals[CHUNK];
        f32v first = splat(INFINITY);
        for (ptrdiff_t i = chunk; i < end; i += LANES) {
            u32v bits;
            memcpy(&bits, noise + i - chunk, sizeof bits);
            f32v deficit = (splat(largest) - load_some(scores + i, end - i)) * (1.0f / temperature);
            f32v slowed = exponential(blend(deficit < 80.0f, deficit, splat(80.0f)));
            f32v arrival = (__builtin_convertvector(bits, f32v) + 0.5f) * slowed;
            store(arrivals + i - chunk, arrival);
            first = blend(arrival < first, arrival, first);
        }
        if (!any(first <= limit)) continue;
        for (ptrdiff_t i = chunk; i < end; i++) {
            float arrival = arrivals[i - chunk];
            if (!(arrival <= limit)) continue;
            float latest = arrival * (noise[i - chunk] >> 31 ? MARGIN : SMALL_MARGIN);
            float score = gumbel(noise[i - chunk]) - (largest - load_some(scores + i, 1)[0]) / temperature;
            if (latest < limit) limit = latest;
            if (score > best) best = score, place = i;
        }
    }
    return place;
}

// Of each of `rows` rows of `size` numbers, `stride` apart, the token that is drawn by `keys` at `temperatures`, or where
// these are 0 the first largest; -1 where the largest is not finite. `tokens`, ascending, names the numbers' tokens; without
// it a token is a place.
void spool_draw(int64_t *to, const element *scores, const int64_t *keys, const float *temperatures,
    const int64_t *tokens, ptrdiff_t rows, ptrdiff_t stride, ptrdiff_t size) {
#pragma omp parallel for schedule(static) if (SHARED_OUT)
    for (ptrdiff_t row = 0; row < rows; row++) {
        const element *of = scores + row * stride;
        float highest = largest_of(of, size);
        if (!isfinite(highest)) {
            to[row] = -1;
            continue;
        }
        ptrdiff_t place = temperatures[row] > 0.0f
                              ? draw_place(of, tokens, size, highest, keys[row], temperatures[row])
                              : first_place(of, size, highest);
        to[row] = tokens ? tokens[place] : place;
    }
}

// Of each of `rows` rows of `size` numbers, `stride` apart: the largest, and the sum of e^(number - largest), rounded down to
// multiples of 2^-34, so that it is exact in any order; NaN where the largest is not finite.
void spool_masses(
    float *largests, double *to, const element *scores, ptrdiff_t rows, ptrdiff_t stride, ptrdiff_t size) {
#pragma omp parallel for schedule(static) if (SHARED_OUT)
    for (ptrdiff_t row = 0; row < rows; row++) {
        const element *of = scores + row * stride;
        float highest = largests[row] = largest_of(of, size);
        double sums[LANES] = {0};
        for (ptrdiff_t i = 0; i < size; i += LANES) {
            f32v mass = exponential(load_some(of + i, size - i) - splat(highest)) * splat(0x1p34f);
            // Larger ones are whole numbers.
            i32v small = mass < 0x1p24f;
            f32v whole = __builtin_convertvector(__builtin_convertvector(blend(small, mass, splat(0.0f)), i32v), f32v);
            float lanes[LANES];
            store(lanes, blend(small, whole, mass));
            for (int lane = 0; lane < LANES; lane++) sums[lane] += lanes[lane];
        }
        for (int lane = 1; lane < LANES; lane++) sums[0] += sums[lane];
        to[row] = isfinite(highest) ? sums[0] * 0x1p-34 : NAN;
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
