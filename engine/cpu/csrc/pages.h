// KV pages: pool [2, pages, kv_heads, page_size, head_dim], keys before values.

#pragma once

#include "vectors.h"

typedef struct {
    ptrdiff_t query_heads, kv_heads, head_dim, page_size, pages;
} Heads;

INLINE bf16 *page_of(bf16 *pool, const Heads *heads, ptrdiff_t values, ptrdiff_t page, ptrdiff_t head) {
    return pool + ((values * heads->pages + page) * heads->kv_heads + head) * heads->page_size * heads->head_dim;
}
