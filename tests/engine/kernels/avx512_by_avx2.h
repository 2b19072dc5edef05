// The AVX-512 instructions that the kernels use (engine/cpu/csrc/isa_avx512.h), as Intel's guide to intrinsics describes
// them, on a processor without AVX-512: included before all else.

#include <immintrin.h>
#include <math.h>
#include <string.h>

#define __AVX512F__ 1
#ifdef WITH_VNNI
#define __AVX512VNNI__ 1
#endif

#define _mm512_fmadd_ps fmadd_ps
static inline __m512 fmadd_ps(__m512 a, __m512 b, __m512 c) {
    for (int i = 0; i < 16; i++) a[i] = fmaf(a[i], b[i], c[i]);
    return a;
}

#define _mm512_cvtepu16_epi32 cvtepu16_epi32
static inline __m512i cvtepu16_epi32(__m256i a) {
    unsigned short from[16];
    unsigned to[16];
    __m512i all;
    memcpy(from, &a, sizeof from);
    for (int i = 0; i < 16; i++) to[i] = from[i];
    memcpy(&all, to, sizeof all);
    return all;
}

#define _mm512_cvtepi8_epi32 cvtepi8_epi32
static inline __m512i cvtepi8_epi32(__m128i a) {
    signed char from[16];
    int to[16];
    __m512i all;
    memcpy(from, &a, sizeof from);
    for (int i = 0; i < 16; i++) to[i] = from[i];
    memcpy(&all, to, sizeof all);
    return all;
}

#define _mm512_cvtph_ps cvtph_ps
static inline __m512 cvtph_ps(__m256i a) {
    __m256 halves[2] = {
        _mm256_cvtph_ps(_mm256_castsi256_si128(a)), _mm256_cvtph_ps(_mm256_extracti128_si256(a, 1))};
    __m512 all;
    memcpy(&all, halves, sizeof all);
    return all;
}

#define _mm512_cvtps_ph(a, rounding) cvtps_ph(a)
static inline __m256i cvtps_ph(__m512 a) {
    __m256 halves[2];
    memcpy(halves, &a, sizeof halves);
    return _mm256_set_m128i(_mm256_cvtps_ph(halves[1], _MM_FROUND_TO_NEAREST_INT),
        _mm256_cvtps_ph(halves[0], _MM_FROUND_TO_NEAREST_INT));
}

#define _mm512_set1_epi32 set1_epi32
static inline __m512i set1_epi32(int a) {
    int all[16];
    __m512i to;
    for (int i = 0; i < 16; i++) all[i] = a;
    memcpy(&to, all, sizeof to);
    return to;
}

#define _mm512_set1_epi16 set1_epi16
static inline __m512i set1_epi16(short a) { return set1_epi32((unsigned short)a * 0x10001u); }

static inline short saturated(int a) { return a > 32767 ? 32767 : a < -32768 ? -32768 : a; }

// Unsigned bytes by signed bytes, neighbours added with saturation.
#define _mm512_maddubs_epi16 maddubs_epi16
static inline __m512i maddubs_epi16(__m512i a, __m512i b) {
    unsigned char x[64];
    signed char y[64];
    short to[32];
    memcpy(x, &a, sizeof x);
    memcpy(y, &b, sizeof y);
    for (int i = 0; i < 32; i++) to[i] = saturated(x[2 * i] * y[2 * i] + x[2 * i + 1] * y[2 * i + 1]);
    memcpy(&a, to, sizeof a);
    return a;
}

#define _mm512_madd_epi16 madd_epi16
static inline __m512i madd_epi16(__m512i a, __m512i b) {
    short x[32], y[32];
    int to[16];
    memcpy(x, &a, sizeof x);
    memcpy(y, &b, sizeof y);
    for (int i = 0; i < 16; i++) to[i] = x[2 * i] * y[2 * i] + x[2 * i + 1] * y[2 * i + 1];
    memcpy(&a, to, sizeof a);
    return a;
}

// Of VNNI: unsigned bytes by signed bytes, four products added to each sum.
#define _mm512_dpbusd_epi32 dpbusd_epi32
static inline __m512i dpbusd_epi32(__m512i sum, __m512i a, __m512i b) {
    unsigned char x[64];
    signed char y[64];
    int to[16];
    memcpy(to, &sum, sizeof to);
    memcpy(x, &a, sizeof x);
    memcpy(y, &b, sizeof y);
    for (int i = 0; i < 64; i++) to[i / 4] += x[i] * y[i];
    memcpy(&sum, to, sizeof sum);
    return sum;
}
