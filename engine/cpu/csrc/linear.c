// Linear layers.

#include "amx.h"

// Vectors of outputs of one panel.
#define PANEL_VECTORS (PANEL / LANES)

// Bytes of weights from a load to the one that is asked for meanwhile, where a panel is read once: past the page where
// hardware stops to look ahead.
#define WEIGHTS_AHEAD 8192
#define CACHE_LINE 64

// Weights that are asked for while others are multiplied: how many bytes from `from` on for a group of WEIGHT_INPUTS
// inputs.
typedef struct {
    const char *from;
    ptrdiff_t bytes;
} Ahead;

// Of weights [LANES, WEIGHT_INPUTS], those of one factor.
INLINE factors weights_of(const element *from, int which) {
#if WEIGHT_INPUTS == FACTOR_ELEMENTS
    (void)which;
    return load_factors(from);
#else
    u32v pairs;
    memcpy(&pairs, from, sizeof pairs);
    return (f32v)(which ? pairs & 0xffff0000 : pairs << 16);
#endif
}

// Adds the parts before that are complete to the sum of one, of which `held` keeps pairs and pairs of pairs.
INLINE f32v add_parts(f32v held[2], ptrdiff_t part, f32v sum) {
    if (part & 1) sum = held[0] + sum;
    if (part == 3) sum = held[1] + sum;
    held[part & 1] = sum;
    return sum;
}

// `count` rows [in] by `vectors` vectors of outputs of a panel [in / WEIGHT_INPUTS, PANEL, WEIGHT_INPUTS] to [count, out],
// of which `columns` are there. Each output is one chain of sums for each part of the inputs, in their order, the first
// one from the bias on.
INLINE void multiply_part(int count, int vectors, void *to, const factor *rows, const element *panel,
    const float *bias, Ahead ahead, const Linear *linear, ptrdiff_t in, ptrdiff_t out, ptrdiff_t columns) {
    f32v totals[LINEAR_ROWS][PANEL_VECTORS], held[LINEAR_ROWS][PANEL_VECTORS][2];
    ptrdiff_t row_factors = in / FACTOR_ELEMENTS, i = 0;
    for (ptrdiff_t done = 0; done < linear->parts; done++) {
        f32v sums[LINEAR_ROWS][PANEL_VECTORS];
#pragma GCC unroll 12
        for (int row = 0; row < count; row++)
#pragma GCC unroll 8
            for (int part = 0; part < vectors; part++)
                sums[row][part] = bias && !done ? load(bias + part * LANES) : splat(0.0f);
        for (ptrdiff_t end = (done + 1) * row_factors / linear->parts; i < end; i += WEIGHT_INPUTS / FACTOR_ELEMENTS) {
            const element *weights = panel + i * FACTOR_ELEMENTS * PANEL;
            if (ahead.bytes > CACHE_LINE) {
                __builtin_prefetch(ahead.from);
                __builtin_prefetch(ahead.from + CACHE_LINE);
            } else {
                // The next panel, for which the smallest cache has no room beside this one.
                __builtin_prefetch(ahead.from, 0, 2);
            }
            ahead.from += ahead.bytes;
#pragma GCC unroll 2
            for (int which = 0; which < WEIGHT_INPUTS / FACTOR_ELEMENTS; which++) {
                factors by[PANEL_VECTORS];
#pragma GCC unroll 8
                for (int part = 0; part < vectors; part++)
                    by[part] = weights_of(weights + part * LANES * WEIGHT_INPUTS, which);
#pragma GCC unroll 12
                for (int row = 0; row < count; row++)
#pragma GCC unroll 8
                    for (int part = 0; part < vectors; part++)
                        sums[row][part] = add_products(sums[row][part], by[part], rows[row * row_factors + i + which]);
            }
        }
#pragma GCC unroll 12
        for (int row = 0; row < count; row++)
#pragma GCC unroll 8
            for (int part = 0; part < vectors; part++)
                totals[row][part] = add_parts(held[row][part], done, sums[row][part]);
    }
#pragma GCC unroll 12
    for (int row = 0; row < count; row++)
        store_outputs(output_at(to, row * out, linear->exact), totals[row], vectors, columns, linear->exact);
}

// The same for a whole panel, in as many parts as registers hold sums of all rows, which are no more than LINEAR_ROWS.
INLINE void multiply(int count, void *to, const factor *rows, const element *panel, const float *bias, Ahead ahead,
    const Linear *linear, ptrdiff_t in, ptrdiff_t out, ptrdiff_t columns) {
    for (ptrdiff_t first = 0; first < columns; first += LINEAR_VECTORS(count) * LANES) {
        multiply_part(count, LINEAR_VECTORS(count), output_at(to, first, linear->exact), rows,
            panel + first * WEIGHT_INPUTS, bias ? bias + first : NULL, ahead, linear, in, out, columns - first);
        ahead.from += in / WEIGHT_INPUTS * ahead.bytes;
    }
}

#ifdef PAIRED
#define FACTORS_OF(rows, factors, size) ((void)(factors), (const factor *)(rows))
#else
#define FACTORS_OF(rows, factors, size) (widen(team, factors, rows, size), (const factor *)(factors))

static void widen(const Team *team, float *to, const element *from, ptrdiff_t size) {
    ptrdiff_t whole = size / LANES * LANES;
    for (SHARED(i, team, size / LANES)) store(to + i * LANES, load_element(from + i * LANES));
    if (whole < size && team->index == 0) {
        element last[LANES] = {};
        memcpy(last, from + whole, (size - whole) * sizeof *last);
        float widened[LANES];
        store(widened, load_element(last));
        memcpy(to + whole, widened, (size - whole) * sizeof *to);
    }
    wait_for_team(team);
}
#endif

// rows [count, in] by weights [panels, in / WEIGHT_INPUTS, PANEL, WEIGHT_INPUTS] or codes, plus the bias, to [count, out].
// `scratch`: [count, in]. `in` is a multiple of WEIGHT_INPUTS.
void team_linear(const Team *team, void *to, const element *rows, const Linear *linear, float *scratch,
    ptrdiff_t count, ptrdiff_t in, ptrdiff_t out) {
    assert(count > 0 && in > 0 && out > 0 && in % WEIGHT_INPUTS == 0);
    if (linear->bits) {
        quantized_linear(team, to, rows, linear, scratch, count, in, out);
        return;
    }
    const element *weights = linear->weights;
    const float *bias = linear->bias;
#ifdef HAS_TILES
    if (spool_has_tiles() && in % TILE_INPUTS == 0 && !linear->exact) {
        tile_linear(team, to, rows, weights, bias, count, in, out);
        return;
    }
#endif
    const factor *row_factors = FACTORS_OF(rows, scratch, count * in);
    ptrdiff_t panels = (out + PANEL - 1) / PANEL, tiles = (count + LINEAR_ROWS - 1) / LINEAR_ROWS;
    // Each reading of a panel asks for its share of the next one.
    ptrdiff_t readings = tiles * PANEL_VECTORS / LINEAR_VECTORS((count + tiles - 1) / tiles);
    ptrdiff_t group_bytes = WEIGHT_INPUTS * PANEL * sizeof *weights, ahead_bytes = (group_bytes + readings - 1) / readings;
    for (SHARED(panel, team, panels)) {
        const element *panel_weights = weights + panel * in * PANEL;
        const float *panel_bias = bias ? bias + panel * PANEL : NULL;
        ptrdiff_t columns = out - panel * PANEL < PANEL ? out - panel * PANEL : PANEL;
        for (ptrdiff_t tile = 0; tile < tiles; tile++) {
            ptrdiff_t first = tile * count / tiles, height = (tile + 1) * count / tiles - first;
            void *outputs = output_at(to, first * out + panel * PANEL, linear->exact);
            const factor *tile_rows = row_factors + first * (in / FACTOR_ELEMENTS);
            ptrdiff_t distance = readings > 1 ? in * PANEL * sizeof *weights : WEIGHTS_AHEAD;
            const Ahead ahead = {
                (const char *)panel_weights + distance + tile * readings / tiles * (in / WEIGHT_INPUTS) * ahead_bytes,
                ahead_bytes};
#define HEIGHT(rows_)                                                                                                  \
    case rows_:                                                                                                        \
        multiply(rows_, outputs, tile_rows, panel_weights, panel_bias, ahead, linear, in, out, columns);               \
        break;
            switch (height) {
                HEIGHT(1)
                HEIGHT(2)
                HEIGHT(3)
                HEIGHT(4)
                HEIGHT(5)
                HEIGHT(6)
#if LINEAR_ROWS > 6
                HEIGHT(7) HEIGHT(8) HEIGHT(9) HEIGHT(10) HEIGHT(11) HEIGHT(12)
#endif
            }
        }
    }
    wait_for_team(team);
}

void spool_linear(void *to, const element *rows, const Linear *linear, float *scratch, ptrdiff_t count, ptrdiff_t in,
    ptrdiff_t out) {
    WITH_TEAM(1, team_linear(team, to, rows, linear, scratch, count, in, out));
}
