// Linear layers.

#include "tiles.h"

#ifdef MULTIPLIES_BF16

#include <immintrin.h>

// The most rows that share a reading of a panel: as registers hold.
#define TILE 12
// Bytes of weights from a load to the one that is asked for meanwhile: past the page where hardware stops to look
// ahead.
#define WEIGHTS_AHEAD 8192

INLINE __m512bh pairs(const bf16 *from) { return (__m512bh)_mm512_loadu_si512(from); }

// `count` rows [in] by a panel [in / 2, PANEL, 2] to [count, out], of which `columns` are there. Each output is one
// chain of sums, from the bias on, in the order of inputs, two at a time.
INLINE void multiply(int count, bf16 *to, const bf16 *rows, const bf16 *panel, const float *bias, ptrdiff_t in,
    ptrdiff_t out, ptrdiff_t columns) {
    __m512 sums[TILE][2];
#pragma GCC unroll 12
    for (int row = 0; row < count; row++)
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++)
            sums[row][half] = bias ? _mm512_loadu_ps(bias + half * LANES) : _mm512_setzero_ps();
    for (ptrdiff_t i = 0; i < in; i += 2) {
        __builtin_prefetch((const char *)(panel + i * PANEL) + WEIGHTS_AHEAD);
        __builtin_prefetch((const char *)(panel + i * PANEL + 2 * LANES) + WEIGHTS_AHEAD);
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
                HEIGHT(3) HEIGHT(4) HEIGHT(5) HEIGHT(6) HEIGHT(7) HEIGHT(8) HEIGHT(9) HEIGHT(10) HEIGHT(11) HEIGHT(12)
            }
        }
    }
}

#endif
