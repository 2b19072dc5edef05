// The processor's matrix tiles (AMX): 16 rows by 32 inputs of bfloat16, or by 16 sums of float32.

#pragma once

#include "kernels.h"

#define TILE_ROWS 16
// Inputs of a product.
#define TILE_INPUTS 32

// Sums of an upper block of rows and of a lower one, each in two halves; rows that are multiplied; by what.
#define UPPER_LEFT 0
#define UPPER_RIGHT 1
#define LOWER_LEFT 2
#define LOWER_RIGHT 3
#define UPPER 4
#define LOWER 5
#define LEFT 6
#define RIGHT 7

// As the processor reads it: bytes of a row, and rows, of each tile.
typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} TileShapes;

INLINE TileShapes tile_shapes(ptrdiff_t upper, ptrdiff_t lower) {
    TileShapes shapes = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) {
        ptrdiff_t rows = tile >= LEFT ? TILE_ROWS : tile < LOWER_LEFT || tile == UPPER ? upper : lower;
        shapes.rows[tile] = rows;
        shapes.row_bytes[tile] = rows ? TILE_INPUTS * sizeof(bf16) : 0;
    }
    return shapes;
}

void tile_linear(const Team *team, bf16 *to, const bf16 *rows, const bf16 *weights, const float *bias, ptrdiff_t count,
    ptrdiff_t in, ptrdiff_t out);
