// Computes the logits of a pass that tests/support/recorded_pass.py has written to a file, and writes them to standard
// output.
//
// For processors that only an emulator has. The file is an image of memory that begins with a Recorded; its pointers are
// places in the file, 0 for what is missing.

#include <stdio.h>

#include "kernels.h"

typedef struct {
    Pass pass;
    Layer *layers;
    ptrdiff_t layer_count, pool_bytes, outputs;
    element *residual;
    Norm norm;
    Linear head;
} Recorded;

static void *room(size_t size) {
    void *memory = aligned_alloc(64, (size + 63) / 64 * 64);
    if (!memory) exit(2);
    memset(memory, 0, size);
    return memory;
}

static char *image;

#define PLACE(pointer) ((pointer) = (pointer) ? (void *)(image + (uintptr_t)(pointer)) : NULL)

static void place_linear(Linear *linear) {
    PLACE(linear->weights);
    PLACE(linear->bias);
}

static void place_norm(Norm *norm) {
    PLACE(norm->weight);
    PLACE(norm->bias);
}

int main(int count, char **arguments) {
    FILE *file = count == 2 ? fopen(arguments[1], "rb") : NULL;
    if (!file || fseek(file, 0, SEEK_END)) return 2;
    size_t size = ftell(file);
    image = room(size);
    rewind(file);
    if (fread(image, 1, size, file) != size) return 2;
    Recorded *of = (Recorded *)image;
    Pass *pass = &of->pass;
    PLACE(pass->cos), PLACE(pass->sin), PLACE(pass->slots), PLACE(pass->pages), PLACE(pass->blocks);
    PLACE(of->layers), PLACE(of->residual);
    place_norm(&of->norm), place_linear(&of->head);
    void **pools = room(of->layer_count * sizeof *pools);
    for (ptrdiff_t i = 0; i < of->layer_count; i++) {
        Layer *layer = of->layers + i;
        place_linear(&layer->qkv), place_linear(&layer->out), place_linear(&layer->up), place_linear(&layer->down);
        place_norm(&layer->attention_norm), place_norm(&layer->attention_post_norm), place_norm(&layer->mlp_norm);
        place_norm(&layer->mlp_post_norm), place_norm(&layer->head_norms.queries), place_norm(&layer->head_norms.keys);
        pools[i] = room(of->pool_bytes);
    }
    ptrdiff_t hidden = of->layers->hidden;
    pass->scratch = room(pass->rows * spool_layer_scratch(of->layers));
    if (spool_layers(of->residual, pools, of->layers, of->layer_count, pass)) return 2;
    element *normed = room(pass->rows * hidden * sizeof *normed);
    spool_norm(normed, of->residual, &of->norm, pass->rows, hidden);
    element *logits = room(pass->rows * of->outputs * sizeof *logits);
    float *widened = room(pass->rows * hidden * sizeof *widened);
    spool_linear(logits, normed, &of->head, widened, pass->rows, hidden, of->outputs);
    size_t written = fwrite(logits, sizeof *logits, pass->rows * of->outputs, stdout);
    return written == (size_t)(pass->rows * of->outputs) ? 0 : 2;
}
