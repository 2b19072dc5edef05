// AVX-512, with bfloat16 products where the processor has them.
// With what all processors share (vectors.h), the kernels are built from this: linear.c, attention.c, rows.c, logits.c.

#include <immintrin.h>

#define LANES 16
// Sums that stay in registers, in rows and vectors: of linear layers, and of values in attention.
#define LINEAR_ROWS 12
#define LINEAR_VECTORS(rows) 2
#define QUANTIZED_ROWS 8
#define QUANTIZED_VECTORS(rows, bits) 2
#define VALUE_QUERIES 4
#define VALUE_VECTORS(queries) 4

INLINE f32v multiply_add(f32v x, f32v y, f32v sum) {
    return (f32v)_mm512_fmadd_ps((__m512)x, (__m512)y, (__m512)sum);
}

INLINE u32v load_u16(const uint16_t *from) {
    return (u32v)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from));
}

INLINE i32v load_s8(const int8_t *from) {
    return (i32v)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from));
}

INLINE f32v load_f16(const uint16_t *from) {
    return (f32v)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
}

INLINE void store_f16(uint16_t *to, f32v x) {
    _mm256_storeu_si256((__m256i *)to, _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

#ifdef __AVX512BF16__
#define MULTIPLIES_PAIRS

// Flushes subnormal products and sums to 0, and rounds once for both products.
INLINE f32v add_pair_products(f32v sum, u32v pairs, u32v by) {
    return (f32v)_mm512_dpbf16_ps((__m512)sum, (__m512bh)pairs, (__m512bh)by);
}

#if defined ELEMENT_BF16 && !defined UNIVERSAL
// Numbers below the normal range become 0.
#define ROUNDS_TO_BF16
INLINE void store_bf16(uint16_t *to, f32v x) {
    __m256bh rounded = _mm512_cvtneps_pbh((__m512)x);
    memcpy(to, &rounded, sizeof rounded);
}
#endif
#endif

// As in isa_avx2.h.
#ifdef __AVX512VNNI__
#define PRODUCT_BITS 8
typedef i32v code_sums;

INLINE code_sums add_code_products(code_sums sum, u8v codes, int32_t row) {
    return (code_sums)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, _mm512_set1_epi32(row));
}

INLINE i32v whole_sums(code_sums sum) { return sum; }
#else
#define PRODUCT_BITS 4
typedef int16_t code_sums __attribute__((vector_size(VECTOR_BYTES)));

INLINE code_sums add_code_products(code_sums sum, u8v codes, int32_t row) {
    return sum + (code_sums)_mm512_maddubs_epi16((__m512i)codes, _mm512_set1_epi32(row));
}

INLINE i32v whole_sums(code_sums sum) { return (i32v)_mm512_madd_epi16((__m512i)sum, _mm512_set1_epi16(1)); }
#endif
