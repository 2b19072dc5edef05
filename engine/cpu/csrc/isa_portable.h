// Any processor: the compiler splits vectors as it must.
// With what all processors share (vectors.h), the kernels are built from this: linear.c, attention.c, rows.c, logits.c.

#define LANES 4
#define LINEAR_ROWS 6
#define LINEAR_VECTORS(rows) ((rows) > 2 ? 2 : 8)
#define QUANTIZED_ROWS 4
#define QUANTIZED_VECTORS(rows, bits) 2
#define VALUE_QUERIES 4
#define VALUE_VECTORS(queries) 2

typedef double f64v __attribute__((vector_size(2 * VECTOR_BYTES)));
typedef int64_t i64v __attribute__((vector_size(2 * VECTOR_BYTES)));

// As if fused. Products are exact in float64, where the sum is rounded to odd: of the two numbers around it, to the one
// whose last bit is 1. Then rounding it again, to float32, gives what rounding once would have given (Boldo and Melquiond,
// "Emulation of FMA and correctly rounded sums", 2008).
INLINE f32v multiply_add(f32v x, f32v y, f32v sum) {
    f64v product = __builtin_convertvector(x, f64v) * __builtin_convertvector(y, f64v);
    f64v addend = __builtin_convertvector(sum, f64v), total = product + addend, back = total - product;
    f64v error = (product - (total - back)) + (addend - back);
    i64v bits = (i64v)total, finite = total - total == 0.0, even = (bits & 1) - 1;
    i64v towards_zero = (error > 0.0) ^ (total > 0.0);
    bits += ((towards_zero & -2) + 1) & (error != 0.0) & finite & even;
    return __builtin_convertvector((f64v)bits, f32v);
}

INLINE u32v load_u16(const uint16_t *from) {
    u16v x;
    memcpy(&x, from, sizeof x);
    return __builtin_convertvector(x, u32v);
}

INLINE i32v load_s8(const int8_t *from) {
    i32v x;
    for (int lane = 0; lane < LANES; lane++) x[lane] = from[lane];
    return x;
}

INLINE float f16_to_float(uint16_t x) {
    // Shifted to float32's place, exponents are 112 too small; the product mends normal and subnormal numbers alike.
    uint32_t bits = (uint32_t)(x & 0x7fff) << 13, sign = (uint32_t)(x & 0x8000) << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    value *= 0x1p112f;
    memcpy(&bits, &value, sizeof bits);
    if ((x & 0x7c00) == 0x7c00) bits |= 0x7f800000;
    bits |= sign;
    memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE uint16_t float_to_f16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    uint16_t sign = bits >> 16 & 0x8000;
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) return sign | 0x7e00;
    if (bits >= 0x477ff000) return sign | 0x7c00;
    if (bits < 0x38800000) {
        // Adding 1/2 leaves a subnormal's digits, rounded, in the lowest places.
        float magnitude;
        memcpy(&magnitude, &bits, sizeof magnitude);
        magnitude += 0.5f;
        memcpy(&bits, &magnitude, sizeof bits);
        return sign | (uint16_t)(bits - 0x3f000000);
    }
    return sign | (uint16_t)((bits - 0x38000000 + 0xfff + (bits >> 13 & 1)) >> 13);
}

INLINE f32v load_f16(const uint16_t *from) {
    f32v x;
    for (int lane = 0; lane < LANES; lane++) x[lane] = f16_to_float(from[lane]);
    return x;
}

INLINE void store_f16(uint16_t *to, f32v x) {
    for (int lane = 0; lane < LANES; lane++) to[lane] = float_to_f16(x[lane]);
}

// As in isa_avx2.h.
#define PRODUCT_BITS 8
typedef i32v code_sums;

INLINE code_sums add_code_products(code_sums sum, u8v codes, int32_t row) {
    for (int k = 0; k < 4; k++)
        sum = sum + ((i32v)codes >> 8 * k & 255) * (int32_t)(int8_t)((uint32_t)row >> 8 * k);
    return sum;
}

INLINE i32v whole_sums(code_sums sum) { return sum; }
