// Vectors of LANES float32 numbers: what all instruction sets share. What differs between them is in isa_*.h.
//
// Of all kernels: every row (in attention: every query head of a row) is computed by itself, through one sequence of
// operations that depends on nothing but its position. So its bits do not depend on what shares the call, nor on the
// number of threads. Multiplications and additions are fused only where multiply_add says so, never by the compiler
// (-ffp-contract=off). Sizes are in elements unless named otherwise; page_size, hidden and inner are multiples of 16,
// head_dim of 32.

#pragma once

#include <assert.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

#if defined __AVX512F__
#define VECTOR_BYTES 64
#elif defined __AVX2__
#define VECTOR_BYTES 32
#else
#define VECTOR_BYTES 16
#endif

typedef float f32v __attribute__((vector_size(VECTOR_BYTES)));
typedef int32_t i32v __attribute__((vector_size(VECTOR_BYTES)));
typedef uint32_t u32v __attribute__((vector_size(VECTOR_BYTES)));
typedef uint16_t u16v __attribute__((vector_size(VECTOR_BYTES / 2)));
typedef uint8_t u8v __attribute__((vector_size(VECTOR_BYTES)));
typedef int8_t s8v __attribute__((vector_size(VECTOR_BYTES / 4)));

#if defined __AVX512F__
#include "isa_avx512.h"
#elif defined __AVX2__
#include "isa_avx2.h"
#elif defined __aarch64__
#include "isa_neon.h"
#else
#include "isa_portable.h"
#endif

_Static_assert(LANES * sizeof(float) == VECTOR_BYTES, "a vector holds LANES numbers");

// Sums across lanes have SUM_LANES of them on every processor, in PARTS vectors, and are added up by one tree: so they
// have the same bits everywhere.
#define SUM_LANES 16
#define PARTS (SUM_LANES / LANES)

INLINE f32v splat(float x) { return x - (f32v){}; }

INLINE f32v load(const float *from) {
    f32v x;
    memcpy(&x, from, sizeof x);
    return x;
}

INLINE void store(float *to, f32v x) { memcpy(to, &x, sizeof x); }

INLINE f32v blend(i32v condition, f32v yes, f32v no) {
    return (f32v)((condition & (i32v)yes) | (~condition & (i32v)no));
}

// Lanes of two vectors, counted through both, as `places` says; these must be constants to the compiler.
INLINE u32v shuffle(u32v x, u32v y, u32v places) {
#ifdef __clang__
    u32v shuffled;
    for (int lane = 0; lane < LANES; lane++)
        shuffled[lane] = places[lane] < LANES ? x[places[lane]] : y[places[lane] - LANES];
    return shuffled;
#else
    return __builtin_shuffle(x, y, places);
#endif
}

// Of each of LANES vectors, what `combine` makes of all of its lanes in pairs, `first` and `second`: to the lane of the
// vector's number in the first vector.
#define REDUCE_ROWS(rows, combine)                                                                                     \
    do {                                                                                                               \
        i32v lane;                                                                                                     \
        for (int i = 0; i < LANES; i++) lane[i] = i;                                                                   \
        _Pragma("GCC unroll 4") for (int step = LANES / 2; step; step /= 2)                                            \
        _Pragma("GCC unroll 8") for (int i = 0; i < step; i++) {                                                       \
            u32v low = (u32v)(rows)[i], high = (u32v)(rows)[i + step];                                                 \
            i32v upper = (lane & step) != 0;                                                                           \
            __typeof__(*(rows)) first, second;                                                                         \
            first = (__typeof__(first))shuffle(low, high, (u32v)(lane + (upper & (LANES - step))));                    \
            second = (__typeof__(first))shuffle(low, high, (u32v)(lane + (upper & LANES) + (~upper & step)));          \
            (rows)[i] = combine;                                                                                       \
        }                                                                                                              \
    } while (0)

// What `combine` makes of the lanes of `x` in pairs, first and second half: `x` and `other`.
#define REDUCE(x, combine)                                                                                             \
    do {                                                                                                               \
        i32v lane;                                                                                                     \
        for (int i = 0; i < LANES; i++) lane[i] = i;                                                                   \
        _Pragma("GCC unroll 4") for (int step = LANES / 2; step; step /= 2) {                                          \
            f32v other = (f32v)shuffle((u32v)x, (u32v)x, (u32v)(lane ^ step));                                         \
            x = combine;                                                                                               \
        }                                                                                                              \
    } while (0)

// The upper half of SUM_LANES lanes added to the lower one, and so on, until they are one vector.
INLINE f32v sum_parts(const f32v parts[PARTS]) {
#if PARTS == 1
    return parts[0];
#elif PARTS == 2
    return parts[0] + parts[1];
#else
    return (parts[0] + parts[2]) + (parts[1] + parts[3]);
#endif
}

INLINE float sum(const f32v parts[PARTS]) {
    f32v x = sum_parts(parts);
    REDUCE(x, x + other);
    return x[0];
}

INLINE float largest(f32v x) {
    REDUCE(x, blend(x < other, other, x));
    return x[0];
}

// e^x within a few parts in 10^7, for x <= 88; below -87, 0. NaN stays NaN.
INLINE f32v exponential(f32v x) {
    const f32v magic = splat(12582912.0f); // 1.5 * 2^23: adding it rounds to a whole number
    f32v bounded = blend(x < -87.0f, splat(-87.0f), x);
    f32v twos = multiply_add(bounded, splat(1.44269504f), magic) - magic;
    f32v rest = multiply_add(twos, splat(-0.693359375f), bounded);
    rest = multiply_add(twos, splat(2.12194440e-4f), rest);
    f32v series = splat(1.0f / 5040);
    series = multiply_add(series, rest, splat(1.0f / 720));
    series = multiply_add(series, rest, splat(1.0f / 120));
    series = multiply_add(series, rest, splat(1.0f / 24));
    series = multiply_add(series, rest, splat(1.0f / 6));
    series = multiply_add(series, rest, splat(0.5f));
    series = multiply_add(series, rest, splat(1.0f));
    series = multiply_add(series, rest, splat(1.0f));
    f32v power = (f32v)((__builtin_convertvector(twos, i32v) + 127) << 23);
    return blend(x < -87.0f, splat(0.0f), series * power);
}

// Within a few parts in 10^7 of 1. NaN stays NaN.
INLINE f32v hyperbolic_tangent(f32v x) {
    f32v bounded = blend(x > 10.0f, splat(10.0f), x);
    return splat(1.0f) - splat(2.0f) / (exponential(bounded + bounded) + splat(1.0f));
}
