// Linear layers by the processor's matrix tiles (AMX).

#include "tiles.h"

#ifdef __AMX_BF16__

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

// Bytes of weights from a load to the one that is asked for meanwhile.
#define WEIGHTS_AHEAD 8192
#define CACHE_LINE 64

// Linux lends the tiles to processes that have asked (arch_prctl(2)).
#define ASK_FOR_FEATURE 0x1023
#define TILE_FEATURE 18

static int lent;

__attribute__((constructor)) static void ask_for_tiles(void) {
    lent = syscall(SYS_arch_prctl, ASK_FOR_FEATURE, TILE_FEATURE) == 0;
}

int spool_has_tiles(void) { return lent; }

// `upper` + `lower` rows [in] by a panel [in / 2, PANEL, 2] to [rows, out], of which `columns` are there. Each output
// is one chain of sums in the order of inputs, a tile of them at a time, and the bias.
INLINE void multiply(bf16 *to, const bf16 *rows, const bf16 *panel, const float *bias, ptrdiff_t upper, ptrdiff_t lower,
    ptrdiff_t in, ptrdiff_t out, ptrdiff_t columns) {
    const bf16 *lower_rows = rows + upper * in;
    ptrdiff_t stride = in * sizeof *rows, panel_stride = 2 * PANEL * sizeof *panel;
    _tile_zero(UPPER_LEFT);
    _tile_zero(UPPER_RIGHT);
    if (lower) {
        _tile_zero(LOWER_LEFT);
        _tile_zero(LOWER_RIGHT);
    }
    for (ptrdiff_t i = 0; i < in; i += TILE_INPUTS) {
        const bf16 *weights = panel + i * PANEL;
        for (ptrdiff_t byte = 0; byte < TILE_INPUTS * PANEL * (ptrdiff_t)sizeof *weights; byte += CACHE_LINE)
            __builtin_prefetch((const char *)weights + WEIGHTS_AHEAD + byte);
        _tile_loadd(LEFT, weights, panel_stride);
        _tile_loadd(RIGHT, weights + 2 * LANES, panel_stride);
        _tile_loadd(UPPER, rows + i, stride);
        _tile_dpbf16ps(UPPER_LEFT, UPPER, LEFT);
        _tile_dpbf16ps(UPPER_RIGHT, UPPER, RIGHT);
        if (lower) {
            _tile_loadd(LOWER, lower_rows + i, stride);
            _tile_dpbf16ps(LOWER_LEFT, LOWER, LEFT);
            _tile_dpbf16ps(LOWER_RIGHT, LOWER, RIGHT);
        }
    }
    float sums[2 * TILE_ROWS][PANEL] __attribute__((aligned(CACHE_LINE)));
    _tile_stored(UPPER_LEFT, sums, sizeof *sums);
    _tile_stored(UPPER_RIGHT, &sums[0][LANES], sizeof *sums);
    if (lower) {
        _tile_stored(LOWER_LEFT, sums[upper], sizeof *sums);
        _tile_stored(LOWER_RIGHT, &sums[upper][LANES], sizeof *sums);
    }
    for (ptrdiff_t row = 0; row < upper + lower; row++) {
        f32v left = load(sums[row]), right = load(sums[row] + LANES);
        if (bias) {
            left += load(bias);
            right += load(bias + LANES);
        }
        store_outputs(to + row * out, left, right, columns);
    }
}

// As spool_linear; `in` is a multiple of TILE_INPUTS.
void tile_linear(
    bf16 *to, const bf16 *rows, const bf16 *weights, const float *bias, ptrdiff_t count, ptrdiff_t in, ptrdiff_t out) {
    ptrdiff_t panels = (out + PANEL - 1) / PANEL, blocks = (count + 2 * TILE_ROWS - 1) / (2 * TILE_ROWS);
    // All blocks have one height, since shapes take time to change. So blocks may overlap: both compute the same.
    ptrdiff_t height = (count + blocks - 1) / blocks;
    ptrdiff_t upper = height > TILE_ROWS ? (height + 1) / 2 : height, lower = height - upper;
    TileShapes shapes = tile_shapes(upper, lower);
#pragma omp parallel
    {
        _tile_loadconfig(&shapes);
#pragma omp for schedule(static)
        for (ptrdiff_t panel = 0; panel < panels; panel++) {
            ptrdiff_t first_column = panel * PANEL, left = out - first_column;
            for (ptrdiff_t block = 0; block < blocks; block++) {
                ptrdiff_t first = block * height < count - height ? block * height : count - height;
                multiply(to + first * out + first_column, rows + first * in, weights + panel * in * PANEL,
                    bias ? bias + first_column : NULL, upper, lower, in, out, left < PANEL ? left : PANEL);
            }
        }
        _tile_release();
    }
}

#else

int spool_has_tiles(void) { return 0; }

#endif
