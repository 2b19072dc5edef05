// Vectors of LANES float32 numbers, and bfloat16 in memory.
//
// Of all kernels: every row (in attention: every query head of a row) is computed by itself, through one sequence of
// operations that depends on nothing but its position. So its bits do not depend on what shares the call, nor on the
// number of threads. Sizes are in elements unless named otherwise; page_size, hidden and inner are multiples of LANES,
// head_dim of twice that.

#pragma once

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifdef __AVX2__
#include <immintrin.h>
#endif

#define LANES 16
#define INLINE static inline __attribute__((always_inline))

typedef uint16_t bf16;
typedef float f32v __attribute__((vector_size(4 * LANES)));
typedef int32_t i32v __attribute__((vector_size(4 * LANES)));
typedef uint32_t u32v __attribute__((vector_size(4 * LANES)));
typedef uint16_t u16v __attribute__((vector_size(2 * LANES)));

INLINE f32v splat(float x) { return x - (f32v){}; }

INLINE f32v load(const float *from) {
    f32v x;
    memcpy(&x, from, sizeof x);
    return x;
}

INLINE void store(float *to, f32v x) { memcpy(to, &x, sizeof x); }

INLINE f32v load_bf16(const bf16 *from) {
    u16v x;
    memcpy(&x, from, sizeof x);
    return (f32v)(__builtin_convertvector(x, u32v) << 16);
}

INLINE float to_float(bf16 x) {
    uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

// Of a number that is one of bfloat16's.
INLINE bf16 to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (bf16)(bits >> 16);
}

// To nearest, ties to even; NaN stays NaN. Numbers below the normal range become 0 where the processor rounds.
INLINE void store_bf16(bf16 *to, f32v value) {
#ifdef __AVX512BF16__
    __m256bh x = _mm512_cvtneps_pbh((__m512)value);
#else
    u32v bits = (u32v)value;
    u32v rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    u32v nan = (u32v)(value != value);
    u16v x = __builtin_convertvector((nan & 0x7fc0) | (~nan & rounded), u16v);
#endif
    memcpy(to, &x, sizeof x);
}

INLINE f32v blend(i32v condition, f32v yes, f32v no) {
    return (f32v)((condition & (i32v)yes) | (~condition & (i32v)no));
}

// Adds to each lane the products of a pair of bfloat16 numbers by another.
INLINE f32v add_products(f32v sum, u32v pairs, u32v by) {
#ifdef __AVX512BF16__
    return (f32v)_mm512_dpbf16_ps((__m512)sum, (__m512bh)pairs, (__m512bh)by);
#else
    sum = sum + (f32v)(pairs & 0xffff0000) * (f32v)(by & 0xffff0000);
    return sum + (f32v)(pairs << 16) * (f32v)(by << 16);
#endif
}

INLINE float sum(f32v x) {
    float lanes[LANES];
    store(lanes, x);
    for (int step = LANES / 2; step; step /= 2)
        for (int lane = 0; lane < step; lane++) lanes[lane] += lanes[lane + step];
    return lanes[0];
}

INLINE float largest(f32v x) {
    float lanes[LANES];
    store(lanes, x);
    for (int step = LANES / 2; step; step /= 2)
        for (int lane = 0; lane < step; lane++)
            lanes[lane] = lanes[lane] < lanes[lane + step] ? lanes[lane + step] : lanes[lane];
    return lanes[0];
}

// e^x within a few parts in 10^7, for x <= 88; below -87, 0. NaN stays NaN.
INLINE f32v exponential(f32v x) {
    const f32v magic = splat(12582912.0f); // 1.5 * 2^23: adding it rounds to a whole number
    f32v bounded = blend(x < -87.0f, splat(-87.0f), x);
    f32v twos = (bounded * 1.44269504f + magic) - magic;
    f32v rest = bounded - twos * 0.693359375f;
    rest = rest - twos * -2.12194440e-4f;
    f32v series = splat(1.0f / 5040);
    series = series * rest + 1.0f / 720;
    series = series * rest + 1.0f / 120;
    series = series * rest + 1.0f / 24;
    series = series * rest + 1.0f / 6;
    series = series * rest + 0.5f;
    series = series * rest + 1.0f;
    series = series * rest + 1.0f;
    f32v power = (f32v)((__builtin_convertvector(twos, i32v) + 127) << 23);
    return blend(x < -87.0f, splat(0.0f), series * power);
}
