// Lists of the experts' work.
//
// A tile is up to TOKENS pairs of one expert. Without lists (null) tile i is pair i with the i-th
// addresses. A tile whose address is 0 is left out: its rows stay as they are.
#pragma once
#include "bits.cuh"

struct Tiles {
    const int* expert;  // [tiles] index of the addresses
    const int* first;   // [tiles] first position
    const int* end;     // [tiles]
    const int* pairs;   // [positions] token * top_k + rank
    int top_k;
};

struct Tile {
    int expert, first, count;
};

__device__ inline Tile this_tile(const Tiles& tiles) {
    const int i = blockIdx.y;
    if (!tiles.expert) return {i, i, 1};
    return {tiles.expert[i], tiles.first[i], tiles.end[i] - tiles.first[i]};
}

__device__ inline int pair_at(const Tiles& tiles, int position) {
    return tiles.pairs ? tiles.pairs[position] : position;
}
