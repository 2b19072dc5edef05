// Compares the CPU kernels with plain C in float64, and rows in company with the same rows alone, on small shapes.
//
// A program without Python, for sanitizers and for processors that only an emulator has. Every array is allocated at its
// exact size, so that AddressSanitizer sees what is read or written beside it. Ends with status 1 at the first
// difference.

#include <stdio.h>

#include "kernels.h"

#if defined ELEMENT_F32
#define HALF_BIT 2e-6
#elif defined ELEMENT_F16
#define HALF_BIT 0x1p-11
#else
#define HALF_BIT 0x1p-8
#endif

#define NEW(type, count) ((type *)calloc_or_end((count), sizeof(type)))

static void *calloc_or_end(size_t count, size_t size) {
    void *memory = aligned_alloc(64, (count * size + 63) / 64 * 64);
    if (!memory) exit(2);
    memset(memory, 0, count * size);
    return memory;
}

static void end_unless(int holds, const char *what) {
    if (holds) return;
    printf("%s\n", what);
    exit(1);
}

static double number(element x) {
#if defined ELEMENT_F32
    return x;
#elif defined ELEMENT_F16
    int exponent = x >> 10 & 31, digits = x & 1023;
    double magnitude = exponent ? ldexp(1024 + digits, exponent - 25) : ldexp(digits, -24);
    if (exponent == 31) magnitude = digits ? NAN : INFINITY;
    return x & 0x8000 ? -magnitude : magnitude;
#else
    uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
#endif
}

// Of a whole number of 64ths between -2 and 2, which all dtypes have.
static element element_of(int sixty_fourths) {
#if defined ELEMENT_F32
    return (float)sixty_fourths / 64;
#elif defined ELEMENT_F16
    int exponent = 0;
    unsigned magnitude = abs(sixty_fourths);
    if (!magnitude) return 0;
    while (magnitude >> (exponent + 1)) exponent++;
    unsigned digits = (magnitude << (10 - exponent)) & 1023;
    return (sixty_fourths < 0 ? 0x8000 : 0) | (exponent - 6 + 15) << 10 | digits;
#else
    float value = (float)sixty_fourths / 64;
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits >> 16;
#endif
}

static uint64_t state = 20251022;

static int draw(int below) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (int)((state >> 33) % below);
}

// Of all results, in the order in which they were noted (FNV-1a).
static uint64_t digest = 14695981039346656037u;

static void note(const void *result, size_t bytes) {
    for (size_t i = 0; i < bytes; i++) digest = (digest ^ ((const uint8_t *)result)[i]) * 1099511628211u;
}

static element *random_elements(ptrdiff_t count) {
    element *numbers = NEW(element, count);
    for (ptrdiff_t i = 0; i < count; i++) numbers[i] = element_of(draw(257) - 128);
    return numbers;
}

static void expect(element got, double exact, double slack, const char *what) {
    double error = fabs(number(got) - exact);
    if (error <= HALF_BIT * slack * fmax(fabs(exact), 0.05)) return;
    printf("%s: %.9g, must be %.9g\n", what, number(got), exact);
    exit(1);
}

// --- linear layers ----------------------------------------------------------------------------------------------------

// weights [out, in] to panels.
static element *to_panels(const element *weights, ptrdiff_t out, ptrdiff_t in) {
    ptrdiff_t panels = (out + PANEL - 1) / PANEL;
    element *to = NEW(element, panels * PANEL * in);
    for (ptrdiff_t o = 0; o < out; o++)
        for (ptrdiff_t i = 0; i < in; i++)
            to[(o / PANEL * (in / WEIGHT_INPUTS) + i / WEIGHT_INPUTS) * PANEL * WEIGHT_INPUTS +
                o % PANEL * WEIGHT_INPUTS + i % WEIGHT_INPUTS] = weights[o * in + i];
    return to;
}

static float *random_bias(ptrdiff_t out) {
    float *bias = NEW(float, (out + PANEL - 1) / PANEL * PANEL);
    for (ptrdiff_t i = 0; i < out; i++) bias[i] = (float)(draw(257) - 128) / 64;
    return bias;
}

static void check_linear(ptrdiff_t count, ptrdiff_t in, ptrdiff_t out, int biased) {
    element *rows = random_elements(count * in), *weights = random_elements(out * in);
    element *panels = to_panels(weights, out, in), *to = NEW(element, count * out), *alone = NEW(element, out);
    float *bias = biased ? random_bias(out) : NULL, *scratch = NEW(float, count * in);
    const Linear linear = {panels, bias, 0, 0, 0, 1, 0};
    spool_linear(to, rows, &linear, scratch, count, in, out);
    note(to, count * out * sizeof *to);
    for (ptrdiff_t row = 0; row < count; row++) {
        for (ptrdiff_t o = 0; o < out; o++) {
            double exact = biased ? bias[o] : 0;
            for (ptrdiff_t i = 0; i < in; i++) exact += number(rows[row * in + i]) * number(weights[o * in + i]);
            expect(to[row * out + o], exact, 1.1, "linear");
        }
        spool_linear(alone, rows + row * in, &linear, scratch, 1, in, out);
        end_unless(!memcmp(alone, to + row * out, out * sizeof *alone), "linear: a row alone has other bits");
    }
    free(rows), free(weights), free(panels), free(to), free(alone), free(bias), free(scratch);
}

// Of a panel's codes, scales and minimums of one group.
static ptrdiff_t block_bytes(const Linear *form) {
    return form->group * PANEL * form->bits / 8 + 2 * PANEL * (form->wide ? 4 : 2);
}

static ptrdiff_t block_at(const Linear *form, ptrdiff_t in, ptrdiff_t o, ptrdiff_t i) {
    return (o / PANEL * (in / form->group) + i / form->group) * block_bytes(form);
}

static void put_code(char *panels, const Linear *form, ptrdiff_t in, ptrdiff_t o, ptrdiff_t i, int code) {
    ptrdiff_t quad = i % form->group / 4, line = form->bits == 4 ? quad / 2 : quad;
    panels[block_at(form, in, o, i) + (line * PANEL + o % PANEL) * 4 + i % 4] |= code << (form->bits == 4 ? quad % 2 * 4 : 0);
}

// A power of two or half more, as float16 has it.
static void put_scale(char *panels, const Linear *form, ptrdiff_t in, ptrdiff_t o, ptrdiff_t i, int which, float value) {
    char *at = panels + block_at(form, in, o, i) + form->group * PANEL * form->bits / 8;
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    uint16_t half = (bits >> 16 & 0x8000) | (((bits >> 23 & 255) - 112) << 10) | (bits >> 13 & 1023);
    if (form->wide)
        memcpy(at + (which * PANEL + o % PANEL) * 4, &value, 4);
    else
        memcpy(at + (which * PANEL + o % PANEL) * 2, &half, 2);
}

// Of a number of a row: its group's scale times its code.
static double rounded(const element *row, ptrdiff_t group, ptrdiff_t i) {
    double peak = 0;
    for (ptrdiff_t k = i / group * group; k < (i / group + 1) * group; k++)
        if (fabs(number(row[k])) > peak) peak = fabs(number(row[k]));
    return peak ? nearbyintf((float)number(row[i]) * (127.0f / (float)peak)) * (peak / 127) : 0;
}

static void check_quantized(ptrdiff_t count, ptrdiff_t in, ptrdiff_t out, int bits, int group, int wide, int biased) {
    float *bias = biased ? random_bias(out) : NULL, *scratch = NEW(float, count * in);
    Linear form = {NULL, bias, bits, group, wide, 1, 0};
    ptrdiff_t panels = (out + PANEL - 1) / PANEL;
    char *weights = NEW(char, panels * (in / group) * block_bytes(&form));
    double *numbers = NEW(double, out * in);
    for (ptrdiff_t o = 0; o < out; o++) {
        float scale = 0, minimum = 0;
        for (ptrdiff_t i = 0; i < in; i++) {
            if (i % group == 0) {
                scale = (draw(2) + 2) * 0.25f / (1 << bits), minimum = -(draw(2) + 2) * 0.125f;
                put_scale(weights, &form, in, o, i, 0, scale);
                put_scale(weights, &form, in, o, i, 1, minimum);
            }
            int code = draw(1 << bits);
            put_code(weights, &form, in, o, i, code);
            numbers[o * in + i] = (double)scale * code + minimum;
        }
    }
    form.weights = weights;
    element *rows = random_elements(count * in), *to = NEW(element, count * out), *alone = NEW(element, out);
    // A group of zeros, which has no scale.
    memset(rows, 0, group * sizeof *rows);
    spool_linear(to, rows, &form, scratch, count, in, out);
    note(to, count * out * sizeof *to);
    double *row_numbers = NEW(double, in);
    for (ptrdiff_t row = 0; row < count; row++) {
        for (ptrdiff_t i = 0; i < in; i++) row_numbers[i] = rounded(rows + row * in, group, i);
        for (ptrdiff_t o = 0; o < out; o++) {
            double exact = biased ? bias[o] : 0;
            for (ptrdiff_t i = 0; i < in; i++) exact += row_numbers[i] * numbers[o * in + i];
            // Sums of float32 are of terms that are much larger than what is left of them.
            expect(to[row * out + o], exact, sizeof(element) == 4 ? 16 : 1.5, "quantized");
        }
        spool_linear(alone, rows + row * in, &form, scratch, 1, in, out);
        end_unless(!memcmp(alone, to + row * out, out * sizeof *alone), "quantized: a row alone has other bits");
    }
    int64_t which[2] = {out - 1, out / 2};
    element *expanded = NEW(element, 2 * in);
    spool_expand_rows(expanded, which, &form, 2, in);
    note(expanded, 2 * in * sizeof *expanded);
    for (ptrdiff_t i = 0; i < 2 * in; i++) expect(expanded[i], numbers[which[i / in] * in + i % in], 1.1, "expanded");
    free(rows), free(weights), free(numbers), free(row_numbers), free(to), free(alone), free(bias), free(scratch);
    free(expanded);
}

// --- what happens between them ----------------------------------------------------------------------------------------

static Norm random_norm(ptrdiff_t size, int centred) {
    return (Norm){random_bias(size), centred ? random_bias(size) : NULL, centred, 1e-5f};
}

static void free_norm(const Norm *norm) { free((void *)norm->weight), free((void *)norm->bias); }

// The norm of numbers [size], in place.
static void exact_norm(double *numbers, const Norm *norm, ptrdiff_t size) {
    double mean = 0, squares = 0;
    for (ptrdiff_t i = 0; norm->centred && i < size; i++) mean += numbers[i] / size;
    for (ptrdiff_t i = 0; i < size; i++) squares += (numbers[i] - mean) * (numbers[i] - mean) / size;
    for (ptrdiff_t i = 0; i < size; i++)
        numbers[i] = (numbers[i] - mean) / sqrt(squares + norm->epsilon) * norm->weight[i] + (norm->bias ? norm->bias[i] : 0);
}

static double exact_activation(double x, int activation) {
    switch (activation) {
    case SILU: return x / (1 + exp(-x));
    case GELU: return x * erfc(-x / sqrt(2)) / 2;
    case GELU_TANH: return x * (1 + tanh(sqrt(2 / acos(-1)) * (x + 0.044715 * x * x * x))) / 2;
    case RELU: return fmax(x, 0);
    default: return fmax(x, 0) * fmax(x, 0);
    }
}

// float32 has as many digits as the functions are exact to.
#define FUNCTION_SLACK (sizeof(element) == 4 ? 32 : 1.5)

static void check_rows(ptrdiff_t rows, ptrdiff_t hidden, int centred) {
    ptrdiff_t size = rows * hidden;
    element *x = random_elements(size), *added = random_elements(size), *more = NEW(element, size);
    element *to = NEW(element, size), *residual = NEW(element, size), *up = random_elements(2 * size);
    double *exact = NEW(double, size);
    const Norm norm = random_norm(hidden, centred), none = {0};
    spool_norm(to, x, &norm, rows, hidden);
    note(to, size * sizeof *to);
    for (ptrdiff_t i = 0; i < size; i++) exact[i] = number(x[i]);
    for (ptrdiff_t row = 0; row < rows; row++) exact_norm(exact + row * hidden, &norm, hidden);
    for (ptrdiff_t i = 0; i < size; i++) expect(to[i], exact[i], FUNCTION_SLACK, "norm");
    spool_norm(to, x, &none, rows, hidden);
    end_unless(!memcmp(to, x, size * sizeof *x), "no norm");

    memcpy(residual, x, size * sizeof *x);
    spool_add(residual, added, &none, 1, rows, hidden);
    note(residual, size * sizeof *to);
    for (ptrdiff_t i = 0; i < size; i++) expect(residual[i], number(x[i]) + number(added[i]), 1.1, "add");
    memcpy(residual, x, size * sizeof *x);
    spool_norm(more, added, &norm, rows, hidden);
    spool_add(residual, added, &norm, 0.375f, rows, hidden);
    note(residual, size * sizeof *to);
    for (ptrdiff_t i = 0; i < size; i++) expect(residual[i], number(x[i]) + number(more[i]) * 0.375, 1.1, "add a norm");

    for (int activation = SILU; activation <= RELU_SQUARED; activation++)
        for (int gated = 0; gated < 2; gated++) {
            spool_activate(to, up, rows, hidden, activation, gated);
            note(to, size * sizeof *to);
            for (ptrdiff_t i = 0; i < size; i++) {
                const element *gate = up + i / hidden * (1 + gated) * hidden + i % hidden;
                double value = exact_activation(number(*gate), activation) * (gated ? number(gate[hidden]) : 1);
                expect(to[i], value, FUNCTION_SLACK, "activate");
            }
        }
    memcpy(to, x, size * sizeof *x);
    spool_cap(to, size, 0.75f, 1.5f);
    note(to, size * sizeof *to);
    for (ptrdiff_t i = 0; i < size; i++) expect(to[i], 1.5 * tanh(number(x[i]) * 0.75 / 1.5), FUNCTION_SLACK, "cap");
    free(x), free(added), free(more), free(to), free(residual), free(up), free(exact), free_norm(&norm);
}

static void check_logits(ptrdiff_t rows, ptrdiff_t size) {
    ptrdiff_t stride = size + 3;
    element *scores = random_elements(rows * stride);
    int64_t *places = NEW(int64_t, rows);
    float *values = NEW(float, rows);
    spool_argmax(places, values, scores, rows, stride, size);
    for (ptrdiff_t row = 0; row < rows; row++) {
        ptrdiff_t best = 0;
        for (ptrdiff_t i = 1; i < size; i++)
            if (number(scores[row * stride + i]) > number(scores[row * stride + best])) best = i;
        end_unless(places[row] == best && values[row] == number(scores[row * stride + best]), "argmax");
    }
    // Where one token is certain, it is drawn.
    float *temperatures = NEW(float, rows);
    int64_t *keys = NEW(int64_t, rows), *drawn = NEW(int64_t, rows);
    for (ptrdiff_t row = 0; row < rows; row++) keys[row] = row, temperatures[row] = row % 2 ? 1e-30f : 0.0f;
    spool_draw(drawn, scores, keys, temperatures, NULL, rows, stride, size);
    for (ptrdiff_t row = 0; row < rows; row++) {
        element best = scores[row * stride + drawn[row]];
        for (ptrdiff_t i = 0; i < size; i++) end_unless(number(scores[row * stride + i]) <= number(best), "draw");
    }
    uint64_t *digests = NEW(uint64_t, rows), *changed = NEW(uint64_t, rows);
    for (ptrdiff_t row = 0; row < rows; row++) places[row] = rows - 1 - row;
    spool_digests(digests, scores, places, rows, stride, size);
    ((char *)(scores + size))[-1] ^= 1;
    spool_digests(changed, scores, places, rows, stride, size);
    for (ptrdiff_t row = 0; row < rows; row++)
        end_unless((digests[row] == changed[row]) == (places[row] > 0), "digests");
    free(scores), free(places), free(values), free(digests), free(changed), free(temperatures), free(keys), free(drawn);
}

static void check_forbid(ptrdiff_t rows, ptrdiff_t size) {
    ptrdiff_t stride = size + 3, bytes = size / 8 + 2;
    element *scores = random_elements(rows * stride), *before = NEW(element, rows * stride);
    uint8_t *allowed = NEW(uint8_t, rows * bytes);
    int64_t *which = NEW(int64_t, rows), *tokens = NEW(int64_t, size);
    for (ptrdiff_t i = 0; i < rows * bytes; i++) allowed[i] = i / 20 % 3 == 0 ? 0 : i / 20 % 3 == 1 ? 255 : i * 37;
    for (ptrdiff_t row = 0; row < rows; row++) which[row] = rows - 1 - row;
    for (ptrdiff_t i = 0; i < size; i++) tokens[i] = 8 * bytes - size + i;
    for (int by_token = 0; by_token < 2; by_token++) {
        memcpy(before, scores, rows * stride * sizeof *scores);
        spool_forbid(scores, which, allowed, by_token ? tokens : NULL, rows, stride, size, bytes);
        for (ptrdiff_t i = 0; i < rows * stride; i++) {
            ptrdiff_t row = rows - 1 - i / stride, token = i % stride + (by_token ? tokens[0] : 0);
            int kept = i % stride >= size || allowed[row * bytes + token / 8] >> token % 8 & 1;
            end_unless(number(scores[i]) == (kept ? number(before[i]) : -INFINITY), "forbid");
        }
    }
    free(scores), free(before), free(allowed), free(which), free(tokens);
}

// --- attention --------------------------------------------------------------------------------------------------------

typedef struct {
    ptrdiff_t query_heads, kv_heads, head_dim, page_size, pages;
} Shape;

// A row of numbers [2, pages, kv_heads, page_size, head_dim].
static const double *kv_of(
    const double *numbers, const Shape *shape, int values, int64_t page, ptrdiff_t head, ptrdiff_t offset) {
    return numbers + (((values * shape->pages + page) * shape->kv_heads + head) * shape->page_size + offset) *
                         shape->head_dim;
}

// Random keys and values, and a pool that holds them, or what is left of them as codes. Some rows are zeros.
static void *random_pool(double *numbers, const Shape *shape, int quantized) {
    ptrdiff_t heads = 2 * shape->pages * shape->kv_heads, page_size = shape->page_size, head_dim = shape->head_dim;
    element *elements = random_elements(heads * page_size * head_dim);
    for (ptrdiff_t row = 0; row < heads * page_size; row += 29) memset(elements + row * head_dim, 0, head_dim * sizeof *elements);
    for (ptrdiff_t i = 0; i < heads * page_size * head_dim; i++) numbers[i] = number(elements[i]);
    if (!quantized) return elements;
    ptrdiff_t head_bytes = page_size * (head_dim + sizeof(float));
    char *pool = NEW(char, heads * head_bytes);
    for (ptrdiff_t row = 0; row < heads * page_size; row++) {
        double *from = numbers + row * head_dim;
        char *head = pool + row / page_size * head_bytes;
        float scale = 0;
        for (ptrdiff_t i = 0; i < head_dim; i++) scale = fmaxf(scale, fabsf((float)from[i]) / 127);
        memcpy(head + page_size * head_dim + row % page_size * sizeof scale, &scale, sizeof scale);
        for (ptrdiff_t i = 0; i < head_dim; i++) {
            int8_t code = scale ? (int8_t)nearbyintf((float)from[i] / scale) : 0;
            head[row % page_size * head_dim + i] = code, from[i] = (double)scale * code;
        }
    }
    free(elements);
    return pool;
}

// Keys, not rotated, and values are written as `random_pool` has them.
// Heads that are normalized, of which rotations by a quarter turn swap halves.
static void check_head_norms(const Shape *shape, int whole, int after, int centred) {
    ptrdiff_t rows = 5, head_dim = shape->head_dim, kv_heads = shape->kv_heads, heads = shape->query_heads + kv_heads;
    ptrdiff_t queries_size = shape->query_heads * head_dim, keys_size = kv_heads * head_dim, half = head_dim / 2;
    ptrdiff_t width = queries_size + 2 * keys_size;
    const HeadNorms norms = {random_norm(queries_size, centred), random_norm(keys_size, centred), whole, after};
    element *qkv = random_elements(rows * width), *queries = NEW(element, rows * queries_size);
    element *pool = NEW(element, 2 * shape->pages * shape->page_size * keys_size);
    double *numbers = NEW(double, rows * width), *turned = NEW(double, head_dim);
    float *cosines = NEW(float, rows * head_dim), *sines = NEW(float, rows * head_dim);
    int64_t *slots = NEW(int64_t, rows);
    for (ptrdiff_t i = 0; i < rows * head_dim; i++) sines[i] = i % head_dim < half ? -1 : 1;
    for (ptrdiff_t i = 0; i < rows * width; i++) numbers[i] = number(qkv[i]);
    for (ptrdiff_t row = 0; row < rows; row++) slots[row] = row;
    spool_rotate_write(queries, pool, qkv, cosines, sines, slots, &norms, rows, shape->query_heads, kv_heads, head_dim,
        shape->page_size, shape->pages, 0);
    note(queries, rows * queries_size * sizeof *queries);
    for (ptrdiff_t row = 0; row < rows; row++) {
        double *of_row = numbers + row * width;
        if (whole) exact_norm(of_row, &norms.queries, queries_size), exact_norm(of_row + queries_size, &norms.keys, keys_size);
        for (ptrdiff_t head = 0; head < heads; head++) {
            int is_query = head < shape->query_heads;
            ptrdiff_t own = is_query ? head : head - shape->query_heads;
            double *of_head = of_row + head * head_dim;
            Norm norm = is_query ? norms.queries : norms.keys;
            norm.weight += own * head_dim, norm.bias = norm.bias ? norm.bias + own * head_dim : NULL;
            if (!whole && !after) exact_norm(of_head, &norm, head_dim);
            for (ptrdiff_t i = 0; i < head_dim; i++) turned[i] = i < half ? -of_head[i + half] : of_head[i - half];
            if (after) exact_norm(turned, &norm, head_dim);
            const element *got = is_query ? queries + row * queries_size + own * head_dim
                                          : pool + (own * shape->page_size + row) * head_dim;
            for (ptrdiff_t i = 0; i < head_dim; i++) expect(got[i], turned[i], 2 * FUNCTION_SLACK, "norms of heads");
        }
    }
    free(qkv), free(queries), free(pool), free(numbers), free(turned), free(cosines), free(sines), free(slots);
    free_norm(&norms.queries), free_norm(&norms.keys);
}

static void check_write(const Shape *shape, int quantized) {
    ptrdiff_t rows = shape->pages * shape->page_size, kv_size = shape->kv_heads * shape->head_dim;
    ptrdiff_t width = (shape->query_heads + 2 * shape->kv_heads) * shape->head_dim;
    ptrdiff_t row_size = shape->head_dim * (quantized ? 1 : sizeof(element)) + (quantized ? sizeof(float) : 0);
    ptrdiff_t bytes = 2 * rows * shape->kv_heads * row_size;
    uint64_t before = state;
    double *numbers = NEW(double, 2 * rows * kv_size), *kept = NEW(double, 2 * rows * kv_size);
    element *elements = random_pool(numbers, shape, 0), *qkv = NEW(element, rows * width);
    state = before;
    char *expected = random_pool(kept, shape, quantized), *pool = NEW(char, bytes);
    float *cosines = NEW(float, rows * shape->head_dim), *sines = NEW(float, rows * shape->head_dim);
    int64_t *slots = NEW(int64_t, rows);
    for (ptrdiff_t i = 0; i < rows * shape->head_dim; i++) cosines[i] = 1;
    for (ptrdiff_t row = 0; row < rows; row++) {
        slots[row] = rows - 1 - row;
        for (ptrdiff_t head = 0; head < 2 * shape->kv_heads; head++) {
            const double *from = kv_of(numbers, shape, head / shape->kv_heads, slots[row] / shape->page_size,
                head % shape->kv_heads, slots[row] % shape->page_size);
            memcpy(qkv + row * width + (shape->query_heads + head) * shape->head_dim, elements + (from - numbers),
                shape->head_dim * sizeof *qkv);
        }
    }
    element *queries = NEW(element, rows * shape->query_heads * shape->head_dim);
    const HeadNorms none = {0};
    spool_rotate_write(queries, pool, qkv, cosines, sines, slots, &none, rows, shape->query_heads, shape->kv_heads,
        shape->head_dim, shape->page_size, shape->pages, quantized);
    end_unless(!memcmp(pool, expected, bytes), "rotate_write");
    free(numbers), free(kept), free(elements), free(qkv), free(expected), free(pool), free(cosines), free(sines);
    free(slots), free(queries);
}

static void check_attention_row(const element *got, const element *query, const double *kv, const Shape *shape,
    const int64_t *pages, ptrdiff_t seen, ptrdiff_t head, const Rule *rule) {
    ptrdiff_t kv_head = head / (shape->query_heads / shape->kv_heads);
    ptrdiff_t first = rule->window && seen > rule->window ? seen - rule->window : 0;
    double *weights = NEW(double, seen), total = rule->sinks ? exp(rule->sinks[head]) : 0;
    for (ptrdiff_t position = first; position < seen; position++) {
        const double *key = kv_of(kv, shape, 0, pages[position / shape->page_size], kv_head, position % shape->page_size);
        double score = 0;
        for (ptrdiff_t i = 0; i < shape->head_dim; i++) score += number(query[i]) * key[i];
        score *= rule->scaling;
        total += weights[position] = exp(rule->cap ? rule->cap * tanh(score / rule->cap) : score);
    }
    for (ptrdiff_t i = 0; i < shape->head_dim; i++) {
        double exact = 0;
        for (ptrdiff_t position = first; position < seen; position++)
            exact += weights[position] / total *
                     kv_of(kv, shape, 1, pages[position / shape->page_size], kv_head, position % shape->page_size)[i];
        end_unless(fabs(number(got[i]) - exact) < 4 * HALF_BIT * fmax(fabs(exact), 0.5), "attend");
    }
    free(weights);
}

static void check_attention(const Shape *shape, const Rule *rule, int quantized) {
    enum { BLOCKS = 3 };
    const ptrdiff_t starts[BLOCKS] = {0, 37, 15}, heights[BLOCKS] = {8, 5, 1};
    ptrdiff_t row_size = shape->query_heads * shape->head_dim, half = shape->pages * shape->kv_heads * shape->page_size;
    double *kv = NEW(double, 2 * half * shape->head_dim);
    void *pool = random_pool(kv, shape, quantized);
    int64_t *pages = NEW(int64_t, shape->pages);
    Block *blocks = NEW(Block, BLOCKS);
    ptrdiff_t rows = 0, listed = 0;
    for (int i = 0; i < BLOCKS; i++) {
        blocks[i] = (Block){rows, heights[i], starts[i], listed};
        rows += heights[i];
        for (ptrdiff_t first = 0; first < starts[i] + heights[i]; first += shape->page_size, listed++)
            pages[listed] = shape->pages - 1 - listed;
    }
    end_unless(listed <= shape->pages, "too few pages");
    element *queries = random_elements(rows * row_size), *to = NEW(element, rows * row_size);
    element *alone = NEW(element, row_size);
    end_unless(!spool_attend(to, queries, pool, pages, blocks, BLOCKS, 8, 42, rule, shape->query_heads,
                   shape->kv_heads, shape->head_dim, shape->page_size, shape->pages, quantized),
        "attend: no memory");
    note(to, rows * row_size * sizeof *to);
    for (int i = 0; i < BLOCKS; i++)
        for (ptrdiff_t row = 0; row < blocks[i].rows; row++) {
            ptrdiff_t place = (blocks[i].first_row + row) * row_size, seen = blocks[i].start + row + 1;
            const Block block = {0, 1, blocks[i].start + row, blocks[i].first_page};
            for (ptrdiff_t head = 0; head < shape->query_heads; head++)
                check_attention_row(to + place + head * shape->head_dim, queries + place + head * shape->head_dim, kv,
                    shape, pages + blocks[i].first_page, seen, head, rule);
            spool_attend(alone, queries + place, pool, pages, &block, 1, 1, seen, rule, shape->query_heads,
                shape->kv_heads, shape->head_dim, shape->page_size, shape->pages, quantized);
            end_unless(!memcmp(alone, to + place, row_size * sizeof *alone), "attend: a row alone has other bits");
        }
    free(pool), free(kv), free(pages), free(blocks), free(queries), free(to), free(alone);
}

// --- whole layers -----------------------------------------------------------------------------------------------------

// Positions [0, rows) of one sequence through the layers, `together` at a time, to `residual`.
static void run_layers(element *residual, const Layer *layers, ptrdiff_t count, ptrdiff_t rows, ptrdiff_t together,
    const Shape *shape, const int64_t *pages, int quantized) {
    ptrdiff_t hidden = layers->hidden, head_dim = shape->head_dim;
    ptrdiff_t row_size = quantized ? head_dim + sizeof(float) : head_dim * sizeof(element);
    ptrdiff_t pool_size = 2 * shape->pages * shape->kv_heads * shape->page_size * row_size;
    void **pools = NEW(void *, count);
    for (ptrdiff_t i = 0; i < count; i++) pools[i] = NEW(char, pool_size);
    for (ptrdiff_t first = 0; first < rows; first += together) {
        ptrdiff_t height = rows - first < together ? rows - first : together;
        float *cosines = NEW(float, height * head_dim), *sines = NEW(float, height * head_dim);
        int64_t *slots = NEW(int64_t, height);
        void *scratch = NEW(char, height * spool_layer_scratch(layers));
        for (ptrdiff_t row = 0; row < height; row++) {
            ptrdiff_t position = first + row;
            slots[row] = pages[position / shape->page_size] * shape->page_size + position % shape->page_size;
            for (ptrdiff_t i = 0; i < head_dim; i++) {
                double angle = position / pow(10000, (double)(i % (head_dim / 2)) / (head_dim / 2.0));
                cosines[row * head_dim + i] = (float)cos(angle);
                sines[row * head_dim + i] = (float)(i < head_dim / 2 ? -sin(angle) : sin(angle));
            }
        }
        const Block block = {0, height, first, 0};
        const Pass pass = {cosines, sines, slots, pages, &block, scratch, height, 1, height, first + height,
            shape->page_size, shape->pages, quantized};
        end_unless(!spool_layers(residual + first * hidden, pools, layers, count, &pass), "layers: no memory");
        free(cosines), free(sines), free(slots), free(scratch);
    }
    for (ptrdiff_t i = 0; i < count; i++) free(pools[i]);
    free(pools);
}

static element *random_panels(ptrdiff_t out, ptrdiff_t in) {
    element *weights = random_elements(out * in), *panels = to_panels(weights, out, in);
    free(weights);
    return panels;
}

// Two layers of one of several kinds: Llama's with norms of heads; with norms behind and layer normalization; parallel.
static void check_layers(
    const Shape *shape, ptrdiff_t hidden, ptrdiff_t inner, ptrdiff_t rows, int quantized, int kind) {
    enum { LAYERS = 2 };
    ptrdiff_t queries = shape->query_heads * shape->head_dim, keys = shape->kv_heads * shape->head_dim;
    ptrdiff_t qkv = queries + 2 * keys;
    Layer layers[LAYERS];
    for (int i = 0; i < LAYERS; i++) {
        layers[i] = (Layer){.qkv = {random_panels(qkv, hidden), random_bias(qkv), .parts = 1},
            .out = {random_panels(hidden, queries), .parts = 4},
            .up = {random_panels(kind ? inner : 2 * inner, hidden), .parts = 1},
            .down = {random_panels(hidden, inner), .parts = 2}, .attention_norm = random_norm(hidden, kind),
            .head_norms = {random_norm(queries, 0), random_norm(keys, 0), kind == 1, kind == 2}, .hidden = hidden,
            .inner = inner, .query_heads = shape->query_heads, .kv_heads = shape->kv_heads, .head_dim = shape->head_dim,
            .activation = kind, .gated = !kind, .parallel = kind == 2, .multiplier = kind ? 0.5f : 1,
            .rule = {.scaling = 0.125f, .window = i * 5}};
        if (kind < 2) layers[i].mlp_norm = random_norm(hidden, kind);
        if (kind == 1) layers[i].attention_post_norm = random_norm(hidden, 0), layers[i].mlp_post_norm = random_norm(hidden, 1);
    }
    int64_t *pages = NEW(int64_t, shape->pages);
    for (ptrdiff_t i = 0; i < shape->pages; i++) pages[i] = shape->pages - 1 - i;
    element *inputs = random_elements(rows * hidden), *one_by_one = NEW(element, rows * hidden);
    element *together = NEW(element, rows * hidden);
    size_t size = rows * hidden * sizeof *inputs;
    memcpy(one_by_one, inputs, size);
    run_layers(one_by_one, layers, LAYERS, rows, 1, shape, pages, quantized);
    note(one_by_one, size);
    end_unless(memcmp(one_by_one, inputs, size), "layers add nothing");
    for (ptrdiff_t i = 0; i < rows * hidden; i++) end_unless(isfinite(number(one_by_one[i])), "layers: no number");
    for (ptrdiff_t count = 2; count <= rows; count += 3) {
        memcpy(together, inputs, size);
        run_layers(together, layers, LAYERS, rows, count, shape, pages, quantized);
        end_unless(!memcmp(together, one_by_one, size), "layers: rows together have other bits");
    }
    for (int i = 0; i < LAYERS; i++) {
        const Layer *layer = layers + i;
        const void *parts[] = {
            layer->qkv.weights, layer->out.weights, layer->up.weights, layer->down.weights, layer->qkv.bias};
        free_norm(&layer->attention_norm), free_norm(&layer->mlp_norm), free_norm(&layer->attention_post_norm);
        free_norm(&layer->mlp_post_norm), free_norm(&layer->head_norms.queries), free_norm(&layer->head_norms.keys);
        for (size_t part = 0; part < sizeof parts / sizeof *parts; part++) free((void *)parts[part]);
    }
    free(pages), free(inputs), free(one_by_one), free(together);
}

int main(void) {
    const Shape shapes[] = {{4, 4, 32, 16, 8}, {6, 2, 64, 16, 8}, {5, 1, 96, 32, 8}, {4, 2, 128, 16, 8}};
    for (int biased = 0; biased < 2; biased++) {
        check_linear(1, 64, 32, biased);
        check_linear(7, 96, 100, biased);
        check_linear(13, 34, 5, biased);
        check_linear(29, 2, 65, biased);
    }
    for (int count = 1; count < 20; count += 3) {
        check_quantized(count, 64, 100, 4, 32, 0, 1);
        check_quantized(count, 96, 33, 4, 32, 1, 0);
        check_quantized(count, 96, 64, 8, 32, 0, 0);
        check_quantized(count, 32, 5, 8, 32, 1, 1);
        check_quantized(count, 64, 32, 8, 16, 1, 0);
    }
    for (int centred = 0; centred < 2; centred++) {
        check_rows(1, 16, centred);
        check_rows(20, 96, centred);
        check_head_norms(shapes, 0, 0, centred);
        check_head_norms(shapes + 1, 1, 0, centred);
        check_head_norms(shapes + 1, 0, 1, centred);
    }
    check_logits(3, 5);
    check_logits(2, 1000);
    check_forbid(3, 5);
    check_forbid(2, 1000);
    const float sinks[] = {0.5f, -1, 2, 0, 1, 0.25f};
    const Rule rules[] = {{NULL, 0, 0.125f, 0}, {NULL, 1, 0.125f, 0}, {NULL, 19, 0.125f, 0}, {NULL, 0, 0.25f, 1.5f},
        {sinks, 0, 0.125f, 0}, {sinks, 33, 0.25f, 2}};
    for (int quantized = 0; quantized < 2; quantized++) {
        for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
            check_write(shapes + i, quantized);
            for (size_t j = 0; j < sizeof rules / sizeof *rules; j++) check_attention(shapes + i, rules + j, quantized);
        }
        for (int kind = 0; kind < 3; kind++) {
            check_layers(shapes, 64, 96, 19, quantized, kind);
            check_layers(shapes + 1, 96, 32, 11, quantized, kind);
        }
    }
    printf("agree: %d lanes, %s\n%016llx\n", LANES,
        spool_has_tiles() ? "tiles" : FACTOR_ELEMENTS == 2 ? "products of pairs" : "products",
        (unsigned long long)digest);
    return 0;
}
