// The router's choice: a warp for each token, PER_LANE experts a lane.
#include "bits.cuh"

#define NOTHING 0x7fffffff

// logits [tokens, experts], bias [experts] or null; ids, weights [tokens, top_k].
// Candidates are compared by score, then by index, so equal scores go to the lower index. A score
// that is not a number counts as the lowest. `mailbox`, if given, lies in the host's memory: a single
// token's ids from its third number on, and then, in the first two, the number of the step.
extern "C" __global__ void route_sigmoid(const float* logits, const float* bias, int experts,
                                         int top_k, float scale, int* ids, float* weights,
                                         volatile int* mailbox, const u64* step) {
    const int lane = threadIdx.x;
    logits += (u64)blockIdx.x * experts;
    ids += (u64)blockIdx.x * top_k;
    weights += (u64)blockIdx.x * top_k;
    const float lowest = __int_as_float(0xff800000);
    float scores[PER_LANE], chances[PER_LANE];
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
        const int expert = 32 * i + lane;
        scores[i] = lowest;
        chances[i] = 0;
        if (expert < experts) {
            const float p = __fdiv_rn(1.0f, 1.0f + expf(-logits[expert]));
            chances[i] = p;
            const float score = bias ? p + bias[expert] : p;
            if (score > lowest) scores[i] = score;
        }
    }
    u32 taken = 0;
    float total = 0, mine = 0;
    for (int rank = 0; rank < top_k; ++rank) {
        float best = lowest;
        int which = NOTHING;
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i) {
            const int expert = 32 * i + lane;
            const bool free = expert < experts && !(taken >> i & 1);
            if (free && (scores[i] > best || which == NOTHING)) {
                best = scores[i];
                which = expert;
            }
        }
        for (int step = 16; step; step /= 2) {
            const float other = __shfl_xor_sync(~0u, best, step);
            const int its = __shfl_xor_sync(~0u, which, step);
            if (other > best || (other == best && its < which)) {
                best = other;
                which = its;
            }
        }
        if (which % 32 == lane) taken |= 1u << which / 32;
        float p = 0;
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i)
            if (i == which / 32) p = chances[i];
        p = __shfl_sync(~0u, p, which % 32);
        total += p;
        if (lane == rank % 32) {
            mine = p;
            ids[rank] = which;
        }
        if (rank % 32 == 31 || rank == top_k - 1)
            if (lane <= rank % 32) weights[rank / 32 * 32 + lane] = mine;
    }
    __syncwarp();
    if (mailbox) {
        for (int rank = lane; rank < top_k; rank += 32) mailbox[2 + rank] = ids[rank];
        __threadfence_system();
        __syncwarp();
        if (lane == 0) *(volatile u64*)mailbox = *step;
    }
    for (int rank = lane; rank < top_k; rank += 32)
        weights[rank] = __fdiv_rn(weights[rank], total + 1e-20f) * scale;
}
