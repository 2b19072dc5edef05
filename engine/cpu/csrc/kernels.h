// What the library offers; each function is described where it is defined.

#pragma once

#include "element.h"
#include "team.h"

// The processor's matrix tiles multiply pairs of bfloat16 numbers.
#if defined __AMX_BF16__ && defined PAIRED
#define HAS_TILES
#endif

// Outputs whose weights lie together.
#define PANEL 32

// Rows [first_row, first_row + rows) are the positions from start on of a sequence whose pages are listed from
// first_page on.
typedef struct {
    int64_t first_row, rows, start, first_page;
} Block;

// How a layer attends. Scores are multiplied by `scaling`; where `cap` is above 0, they become cap * tanh(score / cap). A
// row sees the last `window` positions up to its own, or all of them where that is 0. Of `sinks` [query_heads], which may
// be missing, each is one more score of its head, which has a share and no value.
typedef struct {
    const float *sinks;
    ptrdiff_t window;
    float scaling, cap;
} Rule;

// Panels of weights of a linear layer, and its bias [panels * PANEL], which may be missing. `bits` 0: the weights are
// elements (linear.c). Otherwise they are codes of 4 or 8 bits, and `group` inputs share a scale and a minimum, which are
// float32 where `wide`, and float16 else (quantized.c). Inputs are summed in `parts`, 1, 2 or 4 of equal length, which are
// added in pairs: (0 + 1) + (2 + 3). Matrix tiles leave it at one. Outputs are float32 where `exact`, not elements.
typedef struct {
    const void *weights;
    const float *bias;
    ptrdiff_t bits, group, wide, parts, exact;
} Linear;

// A norm of rows, whose mean is subtracted before where it is `centred`. Without `weight` there is none, and rows stay as
// they are; `bias` may be missing.
typedef struct {
    const float *weight, *bias;
    ptrdiff_t centred;
    float epsilon;
} Norm;

// Of queries and keys, with weights of all heads. Heads are normalized one by one or, if `whole`, as one row; before they
// are rotated, or `after`.
typedef struct {
    Norm queries, keys;
    ptrdiff_t whole, after;
} HeadNorms;

// Activations of an MLP (engine/layers/description.py).
enum { SILU, GELU, GELU_TANH, RELU, RELU_SQUARED };

// What engine/layers/description.py says of a layer. `up` gives gates and what they multiply if the MLP is `gated`. A
// layer whose `inner` is 0 ends behind attention.
typedef struct {
    Linear qkv, out, up, down;
    Norm attention_norm, attention_post_norm, mlp_norm, mlp_post_norm;
    HeadNorms head_norms;
    ptrdiff_t hidden, inner, query_heads, kv_heads, head_dim, activation, gated, parallel;
    Rule rule;
    float multiplier;
} Layer;

// What all layers of a pass share. `scratch` has room for `rows` times what spool_layer_scratch says; `quantized` is of KV
// (pages.h).
typedef struct {
    const float *cos, *sin;
    const int64_t *slots, *pages;
    const Block *blocks;
    void *scratch;
    ptrdiff_t rows, block_count, max_rows, longest, page_size, page_count, quantized;
} Pass;

void spool_norm(element *to, const element *from, const Norm *norm, ptrdiff_t rows, ptrdiff_t hidden);

void spool_add(element *residual, element *added, const Norm *post_norm, float multiplier, ptrdiff_t rows,
    ptrdiff_t hidden);

void spool_activate(
    element *to, const element *up, ptrdiff_t rows, ptrdiff_t inner, ptrdiff_t activation, ptrdiff_t gated);

void spool_cap(element *logits, ptrdiff_t size, float multiplier, float cap);

void spool_rotate_write(element *queries, void *pool, element *qkv, const float *cos, const float *sin,
    const int64_t *slots, const HeadNorms *norms, ptrdiff_t rows, ptrdiff_t query_heads, ptrdiff_t kv_heads,
    ptrdiff_t head_dim, ptrdiff_t page_size, ptrdiff_t pages, ptrdiff_t quantized);

void spool_argmax(
    int64_t *places, float *values, const element *scores, ptrdiff_t rows, ptrdiff_t stride, ptrdiff_t size);

void spool_digests(
    uint64_t *to, const element *scores, const int64_t *which, ptrdiff_t rows, ptrdiff_t stride, ptrdiff_t size);

void spool_draw(int64_t *to, const element *scores, const int64_t *keys, const float *temperatures,
    const int64_t *tokens, ptrdiff_t rows, ptrdiff_t stride, ptrdiff_t size);

void spool_masses(
    float *largests, double *to, const element *scores, ptrdiff_t rows, ptrdiff_t stride, ptrdiff_t size);

void spool_forbid(element *scores, const int64_t *which, const uint8_t *allowed, const int64_t *tokens, ptrdiff_t rows,
    ptrdiff_t stride, ptrdiff_t size, ptrdiff_t bytes);

int spool_attend(element *to, const element *queries, void *pool, const int64_t *pages, const Block *blocks,
    ptrdiff_t block_count, ptrdiff_t max_rows, ptrdiff_t longest, const Rule *rule, ptrdiff_t query_heads,
    ptrdiff_t kv_heads, ptrdiff_t head_dim, ptrdiff_t page_size, ptrdiff_t page_count, ptrdiff_t quantized);

void spool_linear(void *to, const element *rows, const Linear *linear, float *scratch, ptrdiff_t count, ptrdiff_t in,
    ptrdiff_t out);

void spool_expand_rows(element *to, const int64_t *which, const Linear *linear, ptrdiff_t count, ptrdiff_t in);

int spool_has_tiles(void);

ptrdiff_t spool_layer_scratch(const Layer *layer);

int spool_layers(
    element *residual, void *const *pools, const Layer *layers, ptrdiff_t layer_count, const Pass *pass);

// What threads compute together, each calling these with its own `team`.

void team_norm(const Team *team, element *to, const element *from, const Norm *norm, ptrdiff_t rows, ptrdiff_t hidden);

void team_add(const Team *team, element *residual, element *added, const Norm *post_norm, float multiplier,
    element *normed, const Norm *norm, ptrdiff_t parallel, ptrdiff_t rows, ptrdiff_t hidden);

void team_activate(const Team *team, element *to, const element *up, ptrdiff_t rows, ptrdiff_t inner,
    ptrdiff_t activation, ptrdiff_t gated);

void team_rotate_write(const Team *team, element *queries, void *pool, element *qkv, const float *cos,
    const float *sin, const int64_t *slots, const HeadNorms *norms, ptrdiff_t rows, ptrdiff_t query_heads,
    ptrdiff_t kv_heads, ptrdiff_t head_dim, ptrdiff_t page_size, ptrdiff_t pages, ptrdiff_t quantized);

ptrdiff_t attend_scratch(
    ptrdiff_t max_rows, ptrdiff_t longest, ptrdiff_t query_heads, ptrdiff_t kv_heads, ptrdiff_t head_dim);

void team_attend(const Team *team, element *to, const element *queries, void *pool, const int64_t *pages,
    const Block *blocks, ptrdiff_t block_count, ptrdiff_t max_rows, ptrdiff_t longest, const Rule *rule,
    ptrdiff_t query_heads, ptrdiff_t kv_heads, ptrdiff_t head_dim, ptrdiff_t page_size, ptrdiff_t page_count,
    ptrdiff_t quantized, char *scratch);

void team_linear(const Team *team, void *to, const element *rows, const Linear *linear, float *scratch,
    ptrdiff_t count, ptrdiff_t in, ptrdiff_t out);

void quantized_linear(const Team *team, void *to, const element *rows, const Linear *linear, void *scratch,
    ptrdiff_t count, ptrdiff_t in, ptrdiff_t out);

// Where outputs from the `index`-th on go: elements, or numbers in float32 where `exact`.
INLINE void *output_at(void *to, ptrdiff_t index, int exact) {
    return (char *)to + index * (ptrdiff_t)(exact ? sizeof(float) : sizeof(element));
}

// A row's `vectors` vectors of outputs, of which `columns` are there.
INLINE void store_outputs(void *to, const f32v *outputs, int vectors, ptrdiff_t columns, int exact) {
    if (exact) {
        memcpy(to, outputs, (columns < vectors * LANES ? columns : vectors * LANES) * sizeof(float));
        return;
    }
    element all[PANEL], *first = columns < vectors * LANES ? all : to;
#pragma GCC unroll 8
    for (int part = 0; part < vectors; part++) store_element(first + part * LANES, outputs[part]);
    if (first == all) memcpy(to, all, columns * sizeof *all);
}
