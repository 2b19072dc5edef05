// Linear layers.

#include "amx.h"

#ifdef MULTIPLIES_BF16

#include <immintrin.h>

// Bytes of weights from a load to the one that is asked for meanwhile: past the page where hardware stops to look
// ahead.
#define WEIGHTS_AHEAD 8192

INLINE void fetch_weights(const bf16 *from) {
    __builtin_prefetch((const char *)from + WEIGHTS_AHEAD);
    __builtin_prefetch((const char *)(from + 2 * LANES) + WEIGHTS_AHEAD);
}

// `multiply`: `count` rows [in] by a panel [in / 2, PANEL, 2] to [count, out], of which `columns` are there. Each output
// is one chain of sums, from the bias on, in the order of inputs, two at a time. No more than TILE rows share a reading
// of a panel: as registers hold.

#ifdef __AVX512BF16__

#define TILE 12

INLINE __m512bh pairs(const bf16 *from) { return (__m512bh)_mm512_loadu_si512(from); }

INLINE void multiply(int count, bf16 *to, const bf16 *rows, const bf16 *panel, const float *bias, ptrdiff_t in,
    ptrdiff_t out, ptrdiff_t columns) {
    __m512 sums[TILE][2];
#pragma GCC unroll 12
    for (int row = 0; row < count; row++)
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++)
            sums[row][half] = bias ? _mm512_loadu_ps(bias + half * LANES) : _mm512_setzero_ps();
    for (ptrdiff_t i = 0; i < in; i += 2) {
        fetch_weights(panel + i * PANEL);
        __m512bh weights[2] = {pairs(panel + i * PANEL), pairs(panel + i * PANEL + 2 * LANES)};
#pragma GCC unroll 12
        for (int row = 0; row < count; row++) {
            int32_t pair;
            memcpy(&pair, rows + row * in + i, sizeof pair);
            __m512bh inputs = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 2
            for (int half = 0; half < 2; half++)
                sums[row][half] = _mm512_dpbf16_ps(sums[row][half], weights[half], inputs);
        }
    }
#pragma GCC unroll 12
    for (int row = 0; row < count; row++)
        store_outputs(to + row * out, (f32v)sums[row][0], (f32v)sums[row][1], columns);
}

#else

#define TILE 3
// Registers that a row's outputs of one panel take.
#define PARTS 4
#define PART (PANEL / PARTS)

INLINE __m256i pairs(const bf16 *from) { return _mm256_loadu_si256((const __m256i *)from); }

// Of pairs of bfloat16 numbers, the first ones and the second ones as float32.
INLINE __m256 first_of(__m256i pairs) { return (__m256)_mm256_slli_epi32(pairs, 16); }
INLINE __m256 second_of(__m256i pairs) { return (__m256)_mm256_and_si256(pairs, _mm256_set1_epi32(0xffff0000)); }

INLINE void multiply(int count, bf16 *to, const bf16 *rows, const bf16 *panel, const float *bias, ptrdiff_t in,
    ptrdiff_t out, ptrdiff_t columns) {
    __m256 sums[TILE][PARTS];
#pragma GCC unroll 3
    for (int row = 0; row < count; row++)
#pragma GCC unroll 4
        for (int part = 0; part < PARTS; part++)
            sums[row][part] = bias ? _mm256_loadu_ps(bias + part * PART) : _mm256_setzero_ps();
    for (ptrdiff_t i = 0; i < in; i += 2) {
        const bf16 *from = panel + i * PANEL;
        fetch_weights(from);
#pragma GCC unroll 4
        for (int part = 0; part < PARTS; part++) {
            __m256i weights = pairs(from + part * 2 * PART);
#pragma GCC unroll 3
            for (int row = 0; row < count; row++) {
                int32_t pair;
                memcpy(&pair, rows + row * in + i, sizeof pair);
                __m256i inputs = _mm256_set1_epi32(pair);
                sums[row][part] = _mm256_fmadd_ps(first_of(weights), first_of(inputs), sums[row][part]);
                sums[row][part] = _mm256_fmadd_ps(second_of(weights), second_of(inputs), sums[row][part]);
            }
        }
    }
#pragma GCC unroll 3
    for (int row = 0; row < count; row++) {
        f32v halves[2];
        memcpy(halves, sums[row], sizeof halves);
        store_outputs(to + row * out, halves[0], halves[1], columns);
    }
}

#endif

// rows [count, in] by weights [panels, in / 2, PANEL, 2], plus bias [panels * PANEL] if there is one, to [count, out].
void spool_linear(
    bf16 *to, const bf16 *rows, const bf16 *weights, const float *bias, ptrdiff_t count, ptrdiff_t in, ptrdiff_t out) {
#ifdef __AMX_BF16__
    if (spool_has_tiles() && in % TILE_INPUTS == 0) {
        tile_linear(to, rows, weights, bias, count, in, out);
        return;
    }
#endif
    ptrdiff_t panels = (out + PANEL - 1) / PANEL, tiles = (count + TILE - 1) / TILE;
#pragma omp parallel for schedule(static)
    for (ptrdiff_t panel = 0; panel < panels; panel++) {
        const bf16 *panel_weights = weights + panel * in * PANEL;
        const float *panel_bias = bias ? bias + panel * PANEL : NULL;
        ptrdiff_t columns = out - panel * PANEL < PANEL ? out - panel * PANEL : PANEL;
        for (ptrdiff_t tile = 0; tile < tiles; tile++) {
            ptrdiff_t first = tile * count / tiles, height = (tile + 1) * count / tiles - first;
#define HEIGHT(rows_)                                                                                                  \
    case rows_:                                                                                                        \
        multiply(                                                                                                      \
            rows_, to + first * out + panel * PANEL, rows + first * in, panel_weights, panel_bias, in, out, columns);  \
        break;
            switch (height) {
                HEIGHT(1)
                HEIGHT(2)
                HEIGHT(3)
#if TILE > 3
                HEIGHT(4) HEIGHT(5) HEIGHT(6) HEIGHT(7) HEIGHT(8) HEIGHT(9) HEIGHT(10) HEIGHT(11) HEIGHT(12)
#endif
            }
        }
    }
}

#endif
