// AVX2 with fused multiply-add and float16 conversions (FMA, F16C).
// With what all processors share (vectors.h), the kernels are built from this: linear.c, attention.c, rows.c, logits.c.

#include <immintrin.h>

#define LANES 8
#define LINEAR_ROWS 6
#define LINEAR_VECTORS(rows) ((rows) > 2 ? 2 : 4)
#define QUANTIZED_ROWS 8
#define QUANTIZED_VECTORS(rows, bits) ((rows) * (bits) > 16 ? 1 : (rows) * (bits) > 8 ? 2 : 4)
#define VALUE_QUERIES 4
#define VALUE_VECTORS(queries) ((queries) > 3 ? 2 : 4)

INLINE f32v multiply_add(f32v x, f32v y, f32v sum) {
    return (f32v)_mm256_fmadd_ps((__m256)x, (__m256)y, (__m256)sum);
}

INLINE u32v load_u16(const uint16_t *from) {
    return (u32v)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from));
}

INLINE i32v load_s8(const int8_t *from) {
    return (i32v)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)from));
}

INLINE f32v load_f16(const uint16_t *from) { return (f32v)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from)); }

INLINE void store_f16(uint16_t *to, f32v x) {
    _mm_storeu_si128((__m128i *)to, _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

// Sums of products of weights' codes, unsigned and of no more than PRODUCT_BITS bits, and of a row's, which lie in
// [-127, 127]: a lane's four are added. A group has no more than 32 inputs.
#ifdef __AVXVNNI__
#define PRODUCT_BITS 8
typedef i32v code_sums;

INLINE code_sums add_code_products(code_sums sum, u8v codes, int32_t row) {
    return (code_sums)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)codes, _mm256_set1_epi32(row));
}

INLINE i32v whole_sums(code_sums sum) { return sum; }
#else
#define PRODUCT_BITS 4
typedef int16_t code_sums __attribute__((vector_size(VECTOR_BYTES)));

// 16 products of at most 15 * 127 stay within 16 bits.
INLINE code_sums add_code_products(code_sums sum, u8v codes, int32_t row) {
    return sum + (code_sums)_mm256_maddubs_epi16((__m256i)codes, _mm256_set1_epi32(row));
}

INLINE i32v whole_sums(code_sums sum) { return (i32v)_mm256_madd_epi16((__m256i)sum, _mm256_set1_epi16(1)); }
#endif
