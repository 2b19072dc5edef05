// Whole decoder layers.

#include "kernels.h"

INLINE ptrdiff_t largest_size(const Layer *layer) {
    ptrdiff_t queries = layer->query_heads * layer->head_dim, size = queries > layer->inner ? queries : layer->inner;
    return size > layer->hidden ? size : layer->hidden;
}

INLINE ptrdiff_t up_size(const Layer *layer) { return layer->gated ? 2 * layer->inner : layer->inner; }

// Bytes of scratch for a row.
ptrdiff_t spool_layer_scratch(const Layer *layer) {
    ptrdiff_t queries = layer->query_heads * layer->head_dim, keys = layer->kv_heads * layer->head_dim;
    ptrdiff_t elements = 2 * layer->hidden + 3 * queries + 2 * keys + up_size(layer) + layer->inner;
    return largest_size(layer) * sizeof(float) + elements * sizeof(element);
}

// Adds to `residual` [rows, hidden] what the layer adds, and writes keys and values to `pool`. `scratch`: for attention.
static void add_layer(
    const Team *team, element *residual, void *pool, const Layer *layer, const Pass *pass, char *scratch) {
    ptrdiff_t rows = pass->rows, hidden = layer->hidden, inner = layer->inner, head_dim = layer->head_dim;
    ptrdiff_t queries_size = layer->query_heads * head_dim, qkv_size = queries_size + 2 * layer->kv_heads * head_dim;
    float *widened = pass->scratch;
    element *normed = (element *)(widened + rows * largest_size(layer)), *projected = normed + rows * hidden;
    element *qkv = projected + rows * hidden;
    element *queries = qkv + rows * qkv_size, *attended = queries + rows * queries_size;
    element *up = attended + rows * queries_size, *product = up + rows * up_size(layer);
    const Norm none = {0};

    // Rows of no block attend to nothing.
    if (team->index == 0) memset(attended, 0, rows * queries_size * sizeof *attended);
    team_norm(team, normed, residual, &layer->attention_norm, rows, hidden);
    team_linear(team, qkv, normed, &layer->qkv, widened, rows, hidden, qkv_size);
    team_rotate_write(team, queries, pool, qkv, pass->cos, pass->sin, pass->slots, &layer->head_norms, rows,
        layer->query_heads, layer->kv_heads, head_dim, pass->page_size, pass->page_count, pass->quantized);
    team_attend(team, attended, queries, pool, pass->pages, pass->blocks, pass->block_count, pass->max_rows,
        pass->longest, &layer->rule, layer->query_heads, layer->kv_heads, head_dim, pass->page_size, pass->page_count,
        pass->quantized, scratch);
    team_linear(team, projected, attended, &layer->out, widened, rows, queries_size, hidden);
    team_add(team, residual, projected, &layer->attention_post_norm, layer->multiplier, normed, &layer->mlp_norm,
        layer->parallel, rows, hidden);
    if (!inner) return;
    team_linear(team, up, normed, &layer->up, widened, rows, hidden, up_size(layer));
    team_activate(team, product, up, rows, inner, layer->activation, layer->gated);
    team_linear(team, projected, product, &layer->down, widened, rows, inner, hidden);
    team_add(team, residual, projected, &layer->mlp_post_norm, layer->multiplier, NULL, &none, 0, rows, hidden);
}

// The same for layers of one size, one after the other, each with its pool. Gives 0, or 1 where memory ran out.
int spool_layers(
    element *residual, void *const *pools, const Layer *layers, ptrdiff_t layer_count, const Pass *pass) {
    char *scratch = scratch_of_team(
        attend_scratch(pass->max_rows, pass->longest, layers->query_heads, layers->kv_heads, layers->head_dim));
    if (!scratch) return 1;
    WITH_TEAM(1, for (ptrdiff_t i = 0; i < layer_count; i++)
        add_layer(team, residual, pools[i], layers + i, pass, scratch));
    free(scratch);
    return 0;
}
