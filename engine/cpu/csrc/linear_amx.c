// Linear layers by the processor's matrix tiles (AMX).

#include "amx.h"

#ifdef HAS_TILES

#include <sys/syscall.h>
#include <unistd.h>

// Bytes of weights from a load to the one that is asked for meanwhile, where all rows fit one block.
#define WEIGHTS_AHEAD 8192
#define CACHE_LINE 64
// Cache lines of weights that a product takes.
#define PRODUCT_LINES (TILE_INPUTS * PANEL * (ptrdiff_t)sizeof(bf16) / CACHE_LINE)

// Linux lends the tiles to processes that have asked (arch_prctl(2)).
#define ASK_FOR_FEATURE 0x1023
#define TILE_FEATURE 18

static int lent;

__attribute__((constructor)) static void ask_for_tiles(void) {
    lent = syscall(SYS_arch_prctl, ASK_FOR_FEATURE, TILE_FEATURE) == 0;
}

int spool_has_tiles(void) { return lent; }

// Sums of a block of rows by a panel, of which the first `written` rows are in memory as outputs. Those of one block are
// written beside the products of the next: by themselves, they would take as long as a third of them.
typedef struct {
    float sums[2 * TILE_ROWS][PANEL] __attribute__((aligned(CACHE_LINE)));
    bf16 *to;
    const float *bias;
    ptrdiff_t rows, written, columns;
} Finished;

INLINE void write_outputs(Finished *block, ptrdiff_t rows, ptrdiff_t out) {
    ptrdiff_t end = block->written + rows < block->rows ? block->written + rows : block->rows;
    for (ptrdiff_t row = block->written; row < end; row++) {
        f32v outputs[2] = {load(block->sums[row]), load(block->sums[row] + LANES)};
        if (block->bias)
            for (int half = 0; half < 2; half++) outputs[half] += load(block->bias + half * LANES);
        store_outputs(block->to + row * out, outputs, 2, block->columns, 0);
    }
    block->written = end;
}

// What is multiplied, and what happens meanwhile: in each product, `lines` cache lines of weights are asked for from
// `ahead` on, and `write` rows of the block before are written.
typedef struct {
    const bf16 *rows, *panel;
    const char *ahead;
    ptrdiff_t upper, in, out, lines, write;
} Work;

// Sums of rows [in], `upper` of them and where `two` a lower tile as well, by a panel [in / 2, PANEL, 2]: each one chain
// in the order of inputs, a tile of them at a time.
INLINE void multiply(int two, Finished *to, Finished *before, const Work *work) {
    const bf16 *rows = work->rows, *lower_rows = rows + work->upper * work->in, *panel = work->panel;
    const char *ahead = work->ahead;
    ptrdiff_t stride = work->in * sizeof *rows, panel_stride = 2 * PANEL * sizeof *panel;
    _tile_zero(UPPER_LEFT);
    _tile_zero(UPPER_RIGHT);
    if (two) {
        _tile_zero(LOWER_LEFT);
        _tile_zero(LOWER_RIGHT);
    }
    for (ptrdiff_t i = 0; i < work->in; i += TILE_INPUTS, panel += TILE_INPUTS * PANEL) {
        for (ptrdiff_t line = 0; line < work->lines; line++, ahead += CACHE_LINE) __builtin_prefetch(ahead, 0, 1);
        _tile_loadd(UPPER, rows + i, stride);
        _tile_loadd(LEFT, panel, panel_stride);
        _tile_dpbf16ps(UPPER_LEFT, UPPER, LEFT);
        _tile_loadd(RIGHT, panel + 2 * LANES, panel_stride);
        _tile_dpbf16ps(UPPER_RIGHT, UPPER, RIGHT);
        if (two) {
            _tile_loadd(LOWER, lower_rows + i, stride);
            _tile_dpbf16ps(LOWER_LEFT, LOWER, LEFT);
            _tile_dpbf16ps(LOWER_RIGHT, LOWER, RIGHT);
        }
        write_outputs(before, work->write, work->out);
    }
    _tile_stored(UPPER_LEFT, to->sums, sizeof *to->sums);
    _tile_stored(UPPER_RIGHT, &to->sums[0][LANES], sizeof *to->sums);
    if (two) {
        _tile_stored(LOWER_LEFT, to->sums[work->upper], sizeof *to->sums);
        _tile_stored(LOWER_RIGHT, &to->sums[work->upper][LANES], sizeof *to->sums);
    }
}

// As team_linear; `in` is a multiple of TILE_INPUTS.
void tile_linear(const Team *team, bf16 *to, const bf16 *rows, const bf16 *weights, const float *bias, ptrdiff_t count,
    ptrdiff_t in, ptrdiff_t out) {
    ptrdiff_t panels = (out + PANEL - 1) / PANEL, blocks = (count + 2 * TILE_ROWS - 1) / (2 * TILE_ROWS);
    // All blocks have one height, since shapes take time to change. So blocks may overlap: both compute the same.
    ptrdiff_t height = (count + blocks - 1) / blocks;
    ptrdiff_t upper = height > TILE_ROWS ? (height + 1) / 2 : height, lower = height - upper;
    ptrdiff_t products = in / TILE_INPUTS, panel_size = in * PANEL;
    // The blocks of one panel ask for the next panel, each for its share.
    ptrdiff_t lines = (PRODUCT_LINES + blocks - 1) / blocks, share = lines * products * CACHE_LINE;
    TileShapes shapes = tile_shapes(upper, lower);
    Finished finished[2], *now = finished, *before = finished + 1;
    before->rows = before->written = 0;
    _tile_loadconfig(&shapes);
    for (SHARED(panel, team, panels)) {
        ptrdiff_t first_column = panel * PANEL, left = out - first_column;
        const bf16 *here = weights + panel * panel_size;
        for (ptrdiff_t block = 0; block < blocks; block++) {
            ptrdiff_t first = block * height < count - height ? block * height : count - height;
            const Work work = {
                .rows = rows + first * in,
                .panel = here,
                .ahead = blocks > 1 ? (const char *)(here + panel_size) + block * share
                                    : (const char *)here + WEIGHTS_AHEAD,
                .upper = upper,
                .in = in,
                .out = out,
                .lines = lines,
                .write = (height + products - 1) / products,
            };
            now->to = to + first * out + first_column;
            now->bias = bias ? bias + first_column : NULL;
            now->rows = height, now->written = 0;
            now->columns = left < PANEL ? left : PANEL;
            if (lower)
                multiply(1, now, before, &work);
            else
                multiply(0, now, before, &work);
            Finished *free = before;
            before = now, now = free;
        }
    }
    write_outputs(before, height, out);
    _tile_release();
    wait_for_team(team);
}

#else

int spool_has_tiles(void) { return 0; }

#endif
