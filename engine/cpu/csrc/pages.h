// KV pages: pool [2, pages, kv_heads, page_size, head_dim], keys before values.

#pragma once

#include "element.h"

typedef struct {
    ptrdiff_t query_heads, kv_heads, head_dim, page_size, pages;
} Heads;

INLINE element *page_of(element *pool, const Heads *heads, ptrdiff_t values, ptrdiff_t page, ptrdiff_t head) {
    assert(page >= 0 && page < heads->pages && head >= 0 && head < heads->kv_heads);
    return pool + ((values * heads->pages + page) * heads->kv_heads + head) * heads->page_size * heads->head_dim;
}
