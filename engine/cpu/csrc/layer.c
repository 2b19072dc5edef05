// Whole decoder layers of the Llama kind.

#include "kernels.h"

INLINE ptrdiff_t largest_size(const Layer *layer) {
    ptrdiff_t queries = layer->query_heads * layer->head_dim, size = queries > layer->inner ? queries : layer->inner;
    return size > layer->hidden ? size : layer->hidden;
}

// Bytes of scratch for a row.
ptrdiff_t spool_layer_scratch(const Layer *layer) {
    ptrdiff_t queries = layer->query_heads * layer->head_dim, keys = layer->kv_heads * layer->head_dim;
    ptrdiff_t elements = 2 * layer->hidden + 3 * queries + 2 * keys + 3 * layer->inner;
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
    element *gate_up = attended + rows * queries_size, *product = gate_up + rows * 2 * inner;

    // Rows of no block attend to nothing.
    if (team->index == 0) memset(attended, 0, rows * queries_size * sizeof *attended);
    team_norm(team, normed, residual, layer->attention_norm, rows, hidden, layer->attention_epsilon);
    team_linear(team, qkv, normed, &layer->qkv, widened, rows, hidden, qkv_size);
    team_rotate_write(team, queries, pool, qkv, pass->cos, pass->sin, pass->slots, layer->query_norm, layer->key_norm,
        layer->head_epsilon, rows, layer->query_heads, layer->kv_heads, head_dim, pass->page_size, pass->page_count,
        pass->quantized);
    team_attend(team, attended, queries, pool, pass->pages, pass->blocks, pass->block_count, pass->max_rows,
        pass->longest, &layer->rule, layer->query_heads, layer->kv_heads, head_dim, pass->page_size, pass->page_count,
        pass->quantized, scratch);
    team_linear(team, projected, attended, &layer->out, widened, rows, queries_size, hidden);
    team_add_norm(team, normed, residual, projected, layer->mlp_norm, rows, hidden, layer->mlp_epsilon);
    team_linear(team, gate_up, normed, &layer->gate_up, widened, rows, hidden, 2 * inner);
    team_silu_mul(team, product, gate_up, rows, inner);
    team_linear(team, projected, product, &layer->down, widened, rows, inner, hidden);
    team_add(team, residual, projected, rows * hidden);
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
