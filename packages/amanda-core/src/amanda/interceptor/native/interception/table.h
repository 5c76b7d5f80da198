/* Hash tables: plans by op id, places by count, addresses by ordinal. */
#ifndef AMANDA_TABLE_H
#define AMANDA_TABLE_H
#include "interception/base.h"

typedef struct {
    uint64_t key;
    void *value;
} Cell;

/* Open addressing, power-of-two size, no key 0; a removed cell keeps its key with value NULL. */
typedef struct {
    Cell *cells;
    size_t size, used;
} Map;

static inline size_t map_slot(const Map *map, uint64_t key) {
    size_t i = (size_t)(key * 0x9E3779B97F4A7C15ULL >> 20) & (map->size - 1);
    while (map->cells[i].key && map->cells[i].key != key) i = (i + 1) & (map->size - 1);
    return i;
}

static inline void *map_get(const Map *map, uint64_t key) {
    return map->size ? map->cells[map_slot(map, key)].value : NULL;
}

static inline void clear_cells(Cell *cells, size_t count) { /* few: no call, and no string instruction */
    for (size_t i = 0; i < count; i++) cells[i] = (Cell){0, NULL};
}

int map_set(Map *map, uint64_t key, void *value); /* -1: out of memory, no exception set */
int map_reserve(Map *map, size_t more);           /* -1 likewise; else there is room for a few more keys */
void *map_remove(Map *map, uint64_t key);         /* what was there; allocates nothing */
void map_clear(Map *map);

typedef struct {
    PyObject_HEAD
    Map map; /* id -> owned reference; Py_None: nothing is inserted at this op */
} PlanTable;

extern PyTypeObject PlanTable_Type;

#endif
