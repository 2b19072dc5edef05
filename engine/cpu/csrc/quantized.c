// Linear layers whose weights are codes of 4 or 8 bits: a number is scale * code + minimum, and a group of inputs shares
// scale and minimum. Rows are rounded to codes of 8 bits, by groups as well. So the product of two groups is
//     scale * row_scale * sum(code * row_code) + minimum * row_scale * sum(row_code),
// where the sums are of integers, exact in any order; groups are added in the order of inputs.
//
// A panel holds, group after group, the codes of PANEL outputs [inputs / 4, PANEL, 4], then their scales and minimums. With
// 4 bits, a byte holds the codes of two such quads of inputs, the even one in its lower half.

#include "kernels.h"

#define QUAD 4
#define PANEL_VECTORS (PANEL / LANES)
// Bytes of weights from a load to the one that is asked for meanwhile.
#define WEIGHTS_AHEAD 4096
#define CACHE_LINE 64

// A row's scale, scale * sum(codes), and codes.
#define ROW_GROUP_BYTES(group) (2 * sizeof(float) + (group))

INLINE float row_scale(const char *of) {
    float x;
    memcpy(&x, of, sizeof x);
    return x;
}

INLINE int32_t row_quad(const char *of, int quad) {
    int32_t x;
    memcpy(&x, of + 2 * sizeof(float) + quad * QUAD, sizeof x);
    return x;
}

INLINE f32v load_scales(const char *from, int wide) {
    return wide ? load((const float *)from) : load_f16((const uint16_t *)from);
}

INLINE u8v load_bytes(const char *from) {
    u8v x;
    memcpy(&x, from, sizeof x);
    return x;
}

// The largest magnitudes of a group, in any lanes, as whole numbers: without their signs, the bits of floats are ordered
// as these are. Above those of infinity, there is NaN.
INLINE i32v largest_magnitudes(const element *from, int group) {
    i32v highest = {};
    for (int i = 0; i < group; i += LANES) {
        i32v size = (i32v)load_element(from + i) & 0x7fffffff;
        i32v higher = size > highest;
        highest = (size & higher) | (highest & ~higher);
    }
    return highest;
}

// A group's codes, the nearest whole numbers to its numbers times `inverse`; gives their sums, in any lanes.
INLINE i32v round_group(char *to, const element *from, int group, float inverse) {
    const f32v magic = splat(12582912.0f); // 1.5 * 2^23: adding it rounds to a whole number
    i32v total = {};
    for (int i = 0; i < group; i += LANES) {
        i32v code = __builtin_convertvector(load_element(from + i) * inverse + magic - magic, i32v);
        total = total + code;
        s8v bytes = __builtin_convertvector(code, s8v);
        memcpy(to + i, &bytes, sizeof bytes);
    }
    return total;
}

// Groups of rows to their codes, one after the other. Where a number is not finite, the scale of its group is NaN.
INLINE void round_groups(const Team *team, char *codes, const element *rows, ptrdiff_t groups, int group) {
    // LANES groups at a time: a lane each, where all have a number of their own.
    for (SHARED(block, team, (groups + LANES - 1) / LANES)) {
        ptrdiff_t begin = block * LANES, count = groups - begin < LANES ? groups - begin : LANES;
        const element *from = rows + begin * group;
        char *to = codes + begin * ROW_GROUP_BYTES(group);
        i32v all[LANES] = {};
        for (ptrdiff_t i = 0; i < count; i++) all[i] = largest_magnitudes(from + i * group, group);
        REDUCE_ROWS(all, (first & (first > second)) | (second & ~(first > second)));
        f32v peaks = (f32v)all[0], scales = blend(all[0] < 0x7f800000, peaks / 127.0f, splat(NAN));
        float inverses[LANES], heads[2][LANES];
        store(inverses, blend(peaks > 0.0f, 127.0f / peaks, splat(0.0f)));
        for (ptrdiff_t i = 0; i < count; i++)
            all[i] = round_group(
                to + i * ROW_GROUP_BYTES(group) + 2 * sizeof(float), from + i * group, group, inverses[i]);
        REDUCE_ROWS(all, first + second);
        store(heads[0], scales);
        store(heads[1], scales * __builtin_convertvector(all[0], f32v));
        for (ptrdiff_t i = 0; i < count; i++) {
            const float head[2] = {heads[0][i], heads[1][i]};
            memcpy(to + i * ROW_GROUP_BYTES(group), head, sizeof head);
        }
    }
}

// Adds a group's products to sums [count, PANEL_VECTORS], of `vectors` vectors of outputs from the first one on. `block`
// holds the group's codes, scales and minimums; `at` is where the group begins in each of the rows. Where the processor
// multiplies no more than 4 bits at once, `high` are the sums of the upper halves of codes of 8 bits.
INLINE void add_group(int count, int vectors, int bits, int group, f32v sums[][PANEL_VECTORS], int first_vector,
    const char *block, const char *const *rows, ptrdiff_t at, int wide) {
    code_sums low[QUANTIZED_ROWS][PANEL_VECTORS], high[QUANTIZED_ROWS][PANEL_VECTORS];
#pragma GCC unroll 12
    for (int row = 0; row < count; row++)
#pragma GCC unroll 8
        for (int part = 0; part < vectors; part++) low[row][part] = high[row][part] = (code_sums){};
    const int split = bits > PRODUCT_BITS;
    const char *codes = block + first_vector * (int)sizeof(u8v);
#pragma GCC unroll 1
    for (int line = 0; line < group * bits / (8 * QUAD); line++) {
        u8v lower[PANEL_VECTORS], upper[PANEL_VECTORS];
#pragma GCC unroll 8
        for (int part = 0; part < vectors; part++) {
            u8v packed = load_bytes(codes + line * PANEL * QUAD + part * (int)sizeof(u8v));
            lower[part] = bits == 4 || split ? packed & 15 : packed, upper[part] = packed >> 4;
        }
#pragma GCC unroll 12
        for (int row = 0; row < count; row++)
#pragma GCC unroll 8
            for (int part = 0; part < vectors; part++) {
                code_sums *sum = &low[row][part];
                if (bits == 4) {
                    *sum = add_code_products(*sum, lower[part], row_quad(rows[row] + at, 2 * line));
                    *sum = add_code_products(*sum, upper[part], row_quad(rows[row] + at, 2 * line + 1));
                } else {
                    *sum = add_code_products(*sum, lower[part], row_quad(rows[row] + at, line));
                    if (split)
                        high[row][part] =
                            add_code_products(high[row][part], upper[part], row_quad(rows[row] + at, line));
                }
            }
    }
    const char *scales = block + group * PANEL * bits / 8;
    const int size = wide ? sizeof(float) : sizeof(uint16_t);
#pragma GCC unroll 8
    for (int part = 0; part < vectors; part++) {
        int place = (first_vector + part) * LANES;
        f32v scale = load_scales(scales + place * size, wide), minimum = load_scales(scales + (PANEL + place) * size, wide);
#pragma GCC unroll 12
        for (int row = 0; row < count; row++) {
            i32v total = whole_sums(low[row][part]);
            if (split) total = total + (whole_sums(high[row][part]) << 4);
            f32v *sum = &sums[row][first_vector + part];
            f32v product = multiply_add(__builtin_convertvector(total, f32v), scale * row_scale(rows[row] + at), *sum);
            *sum = multiply_add(minimum, splat(row_scale(rows[row] + at + sizeof(float))), product);
        }
    }
}

// Sums of rows and a panel, [rows, PANEL_VECTORS].
typedef f32v Sums[QUANTIZED_ROWS][PANEL_VECTORS];

// Products of `count` rows and a panel, of `groups` groups from where both begin, added to `left` and then to `before`,
// which may both be missing.
INLINE void sum_groups(int count, int bits, int group, int wide, Sums to, Sums left, Sums before, const char *rows,
    ptrdiff_t row_bytes, const char *panel, const float *bias, ptrdiff_t groups) {
    const int block_bytes = group * PANEL * bits / 8 + 2 * PANEL * (wide ? sizeof(float) : sizeof(uint16_t));
    Sums sums;
    const char *of[QUANTIZED_ROWS];
#pragma GCC unroll 12
    for (int row = 0; row < count; row++) {
        of[row] = rows + row * row_bytes;
        for (int part = 0; part < PANEL_VECTORS; part++)
            sums[row][part] = bias ? load(bias + part * LANES) : splat(0.0f);
    }
    const int vectors = QUANTIZED_VECTORS(count, bits);
    for (ptrdiff_t i = 0; i < groups; i++) {
        const char *block = panel + i * block_bytes;
        for (int line = 0; line < block_bytes; line += CACHE_LINE) __builtin_prefetch(block + WEIGHTS_AHEAD + line);
#pragma GCC unroll 8
        for (int first = 0; first < PANEL_VECTORS; first += vectors)
            add_group(count, vectors, bits, group, sums, first, block, of, i * ROW_GROUP_BYTES(group), wide);
    }
#pragma GCC unroll 12
    for (int row = 0; row < count; row++)
#pragma GCC unroll 8
        for (int part = 0; part < PANEL_VECTORS; part++) {
            f32v sum = sums[row][part];
            if (left) sum = left[row][part] + sum;
            if (before) sum = before[row][part] + sum;
            to[row][part] = sum;
        }
}

typedef void SumGroups(Sums to, Sums left, Sums before, const char *rows, ptrdiff_t row_bytes, const char *panel,
    const float *bias, ptrdiff_t groups);

// A function of its own for each form of weights and 1, 2, 4 or 8 rows: the compiler knows all sizes of its loops. Few
// heights: each takes a second or so to compile.
#define HEIGHT(name, count, bits, group, wide)                                                                         \
    __attribute__((noinline)) static void name##_##count(Sums to, Sums left, Sums before, const char *rows,            \
        ptrdiff_t row_bytes, const char *panel, const float *bias, ptrdiff_t groups) {                                 \
        sum_groups(count, bits, group, wide, to, left, before, rows, row_bytes, panel, bias, groups);                  \
    }

#if QUANTIZED_ROWS > 4
#define EIGHT(name, bits, group, wide) HEIGHT(name, 8, bits, group, wide)
#define OR_EIGHT(name) , name##_8
#else
#define EIGHT(name, bits, group, wide)
#define OR_EIGHT(name)
#endif

#define FORM(name, bits, group, wide)                                                                                  \
    HEIGHT(name, 1, bits, group, wide)                                                                                 \
    HEIGHT(name, 2, bits, group, wide)                                                                                 \
    HEIGHT(name, 4, bits, group, wide)                                                                                 \
    EIGHT(name, bits, group, wide)                                                                                     \
    static SumGroups *const name[] = {name##_1, name##_2, name##_4 OR_EIGHT(name)};

FORM(sum_4, 4, 32, 0)
FORM(sum_4_wide, 4, 32, 1)
FORM(sum_8, 8, 32, 0)
FORM(sum_8_wide, 8, 32, 1)
FORM(sum_8_wide_16, 8, 16, 1)

INLINE ptrdiff_t block_size(const Linear *linear) {
    return linear->group * PANEL * linear->bits / 8 + 2 * PANEL * (linear->wide ? sizeof(float) : sizeof(uint16_t));
}

// `count` rows by a panel of `groups` groups, to [count, out], of which `columns` are there.
static void multiply_rows(SumGroups *const *of_height, void *to, const char *rows, ptrdiff_t count, const char *panel,
    const float *bias, const Linear *linear, ptrdiff_t groups, ptrdiff_t out, ptrdiff_t columns) {
    ptrdiff_t group_bytes = ROW_GROUP_BYTES(linear->group), row_bytes = groups * group_bytes;
    for (int power = QUANTIZED_ROWS > 4 ? 3 : 2; count; power--)
        for (; count >= 1 << power; count -= 1 << power) {
            for (int row = 0; row < 1 << power; row++) __builtin_prefetch(output_at(to, row * out, linear->exact), 1);
            // Of the parts with even numbers, and of those with odd ones together with all before them.
            Sums sums[2];
            for (ptrdiff_t done = 0, size = groups / linear->parts; done < linear->parts; done++)
                of_height[power](sums[done & 1], done & 1 ? sums[0] : NULL, done == 3 ? sums[1] : NULL,
                    rows + done * size * group_bytes, row_bytes, panel + done * size * block_size(linear),
                    done ? NULL : bias, size);
            f32v(*totals)[PANEL_VECTORS] = sums[linear->parts > 1];
            for (int row = 0; row < 1 << power; row++, to = output_at(to, out, linear->exact), rows += row_bytes)
                store_outputs(to, totals[row], PANEL_VECTORS, columns, linear->exact);
        }
}

INLINE SumGroups *const *sums_of(const Linear *linear) {
    if (linear->group == 16) return sum_8_wide_16;
    if (linear->bits == 4) return linear->wide ? sum_4_wide : sum_4;
    return linear->wide ? sum_8_wide : sum_8;
}

// As team_linear, of codes. `in` is a multiple of 32.
void quantized_linear(const Team *team, void *to, const element *rows, const Linear *linear, void *scratch,
    ptrdiff_t count, ptrdiff_t in, ptrdiff_t out) {
    assert(in % linear->group == 0 && (linear->group == 32 || (linear->group == 16 && linear->bits == 8 && linear->wide)));
    char *codes = scratch;
    ptrdiff_t panels = (out + PANEL - 1) / PANEL, groups = in / linear->group;
    if (linear->group == 32)
        round_groups(team, codes, rows, count * in / 32, 32);
    else
        round_groups(team, codes, rows, count * in / 16, 16);
    wait_for_team(team);
    for (SHARED(panel, team, panels)) {
        const char *weights = (const char *)linear->weights + panel * groups * block_size(linear);
        const float *bias = linear->bias ? linear->bias + panel * PANEL : NULL;
        ptrdiff_t columns = out - panel * PANEL < PANEL ? out - panel * PANEL : PANEL;
        void *outputs = output_at(to, panel * PANEL, linear->exact);
        multiply_rows(sums_of(linear), outputs, codes, count, weights, bias, linear, groups, out, columns);
    }
    wait_for_team(team);
}

// The numbers of some outputs' weights [count, in], as elements: rows of an embedding.
void spool_expand_rows(element *to, const int64_t *which, const Linear *linear, ptrdiff_t count, ptrdiff_t in) {
    ptrdiff_t group = linear->group, block_bytes = block_size(linear), panel_bytes = in / group * block_bytes;
    int wide = linear->wide, size = wide ? sizeof(float) : sizeof(uint16_t);
    for (ptrdiff_t row = 0; row < count; row++) {
        ptrdiff_t place = which[row] % PANEL;
        const char *panel = (const char *)linear->weights + which[row] / PANEL * panel_bytes;
        for (ptrdiff_t first = 0; first < in; first += group) {
            const char *block = panel + first / group * block_bytes, *scales = block + group * PANEL * linear->bits / 8;
            char both[2][sizeof(f32v)] = {};
            memcpy(both[0], scales + place * size, size);
            memcpy(both[1], scales + (PANEL + place) * size, size);
            float scale[LANES], minimum[LANES];
            store(scale, load_scales(both[0], wide));
            store(minimum, load_scales(both[1], wide));
            float numbers[32];
            for (int i = 0; i < group; i++) {
                int quad = i / QUAD, line = linear->bits == 4 ? quad / 2 : quad;
                uint8_t code = block[(line * PANEL + place) * QUAD + i % QUAD];
                if (linear->bits == 4) code = quad % 2 ? code >> 4 : code & 15;
                numbers[i] = scale[0] * code + minimum[0];
            }
            for (int i = 0; i < group; i += LANES) store_element(to + row * in + first + i, load(numbers + i));
        }
    }
}
