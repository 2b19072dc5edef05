// 64-bit ARM (NEON), with bfloat16 products where the processor has them.
// With what all processors share (vectors.h), the kernels are built from this: linear.c, attention.c, rows.c, logits.c.

#include <arm_neon.h>

#define LANES 4
#define LINEAR_ROWS 6
#define LINEAR_VECTORS(rows) ((rows) > 2 ? 4 : 8)
#define QUANTIZED_ROWS 4
#define QUANTIZED_VECTORS(rows, bits) ((rows) * (bits) > 8 ? 4 : 8)
#define VALUE_QUERIES 4
#define VALUE_VECTORS(queries) 4

INLINE f32v multiply_add(f32v x, f32v y, f32v sum) {
    return (f32v)vfmaq_f32((float32x4_t)sum, (float32x4_t)x, (float32x4_t)y);
}

INLINE u32v load_u16(const uint16_t *from) { return (u32v)vmovl_u16(vld1_u16(from)); }

INLINE i32v load_s8(const int8_t *from) {
    uint32_t codes;
    memcpy(&codes, from, sizeof codes);
    return (i32v)vmovl_s16(vget_low_s16(vmovl_s8(vcreate_s8(codes))));
}

INLINE f32v load_f16(const uint16_t *from) { return (f32v)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from))); }

INLINE void store_f16(uint16_t *to, f32v x) { vst1_u16(to, vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)x))); }

#ifdef __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
#define MULTIPLIES_PAIRS

// The second products before the first, each sum rounded once.
INLINE f32v add_pair_products(f32v sum, u32v pairs, u32v by) {
    bfloat16x8_t x = (bfloat16x8_t)pairs, y = (bfloat16x8_t)by;
    return (f32v)vbfmlalbq_f32(vbfmlaltq_f32((float32x4_t)sum, x, y), x, y);
}
#endif

// As in isa_avx2.h. Codes of 4 bits are the same signed and unsigned.
#define PRODUCT_BITS 4
typedef i32v code_sums;

INLINE code_sums add_code_products(code_sums sum, u8v codes, int32_t row) {
    int8x16_t x = (int8x16_t)codes, y = vreinterpretq_s8_s32(vdupq_n_s32(row));
#ifdef __ARM_FEATURE_DOTPROD
    return (code_sums)vdotq_s32((int32x4_t)sum, x, y);
#else
    int16x8_t low = vmull_s8(vget_low_s8(x), vget_low_s8(y)), high = vmull_high_s8(x, y);
    return (code_sums)vaddq_s32((int32x4_t)sum, vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high)));
#endif
}

INLINE i32v whole_sums(code_sums sum) { return sum; }
