// Elements: the numbers of the model's dtype, as weights, rows and KV have them in memory. A library is built for one
// dtype, by -DELEMENT_F32, -DELEMENT_F16 or -DELEMENT_BF16. All sums are float32.

#pragma once

#include "vectors.h"

typedef uint16_t bf16;

INLINE f32v load_bf16(const bf16 *from) { return (f32v)(load_u16(from) << 16); }

#ifndef ROUNDS_TO_BF16
// To nearest, ties to even; NaN stays NaN.
INLINE void store_bf16(bf16 *to, f32v value) {
    u32v bits = (u32v)value;
    u32v rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    u32v nan = (u32v)(value != value);
    u16v x = __builtin_convertvector((nan & 0x7fc0) | (~nan & rounded), u16v);
    memcpy(to, &x, sizeof x);
}
#endif

// Codes of 8 bits.
INLINE f32v load_codes(const char *from) {
    return __builtin_convertvector(load_s8((const int8_t *)from), f32v);
}

// UNIVERSAL: results have the same bits on all processors. Products of pairs, and what else processors round in ways of
// their own, are left out.
//
// PAIRED: products are taken of pairs of elements, as they lie in memory. Otherwise elements are widened to float32
// before. WEIGHT_INPUTS: inputs whose weights for one output lie side by side in a panel.

#if defined ELEMENT_F32

typedef float element;
#define WEIGHT_INPUTS 1
static const element LOWEST = -INFINITY;
INLINE f32v load_element(const element *from) { return load(from); }
INLINE void store_element(element *to, f32v x) { store(to, x); }

#elif defined ELEMENT_F16

typedef uint16_t element;
#define WEIGHT_INPUTS 1
static const element LOWEST = 0xfc00; // -infinity
INLINE f32v load_element(const element *from) { return load_f16(from); }
INLINE void store_element(element *to, f32v x) { store_f16(to, x); }

#elif defined ELEMENT_BF16

typedef bf16 element;
#define WEIGHT_INPUTS 2
static const element LOWEST = 0xff80; // -infinity
INLINE f32v load_element(const element *from) { return load_bf16(from); }
INLINE void store_element(element *to, f32v x) { store_bf16(to, x); }
#if defined MULTIPLIES_PAIRS && !defined UNIVERSAL
#define PAIRED
#endif

#else
#error "one of ELEMENT_F32, ELEMENT_F16 and ELEMENT_BF16 must be defined"
#endif

// What one factor of a product takes in memory where rows are multiplied, and in a vector, by what.
#ifdef PAIRED

#define FACTOR_ELEMENTS 2
typedef uint32_t factor __attribute__((may_alias)); // of rows in memory
typedef u32v factors;

INLINE factors load_factors(const element *from) {
    factors x;
    memcpy(&x, from, sizeof x);
    return x;
}

// Codes of 8 bits, which are elements, too.
INLINE factors load_code_factors(const char *from) {
    u32v pairs = load_u16((const uint16_t *)from);
    u32v first = (u32v)__builtin_convertvector((i32v)(pairs << 24) >> 24, f32v);
    u32v second = (u32v)__builtin_convertvector((i32v)(pairs << 16) >> 24, f32v);
    return first >> 16 | second;
}

INLINE f32v add_products(f32v sum, factors x, factor by) { return add_pair_products(sum, x, by - (u32v){}); }

#else

#define FACTOR_ELEMENTS 1
typedef float factor;
typedef f32v factors;

INLINE factors load_factors(const element *from) { return load_element(from); }

INLINE factors load_code_factors(const char *from) { return load_codes(from); }

INLINE f32v add_products(f32v sum, factors x, factor by) { return multiply_add(x, splat(by), sum); }

#endif
