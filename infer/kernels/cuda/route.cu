// The router's choice: a warp for each token.
#include "bits.cuh"

#define PER_LANE 32
#define NOTHING 0x7fffffff

// logits [tokens, experts], bias [experts] or null; ids, weights [tokens, top_k].
// Candidates are compared by score, then by index, so equal scores go to the lower index. A score
// that is not a number counts as the lowest.
extern "C" __global__ void route_sigmoid(const float* logits, const float* bias, int experts,
                                         int top_k, float scale, int* ids, float* weights) {
    const int lane = threadIdx.x;
    logits += (u64)blockIdx.x * experts;
    ids += (u64)blockIdx.x * top_k;
    weights += (u64)blockIdx.x * top_k;
    const float lowest = __int_as_float(0xff800000);
    float scores[PER_LANE];
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
        const int expert = 32 * i + lane;
        scores[i] = lowest;
        if (expert < experts) {
            const float p = __fdiv_rn(1.0f, 1.0f + expf(-logits[expert]));
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
        const float p = __fdiv_rn(1.0f, 1.0f + expf(-logits[which]));
        total += p;
        if (lane == rank % 32) {
            mine = p;
            ids[rank] = which;
        }
        if (rank % 32 == 31 || rank == top_k - 1)
            if (lane <= rank % 32) weights[rank / 32 * 32 + lane] = mine;
    }
    __syncwarp();
    for (int rank = lane; rank < top_k; rank += 32)
        weights[rank] = __fdiv_rn(weights[rank], total + 1e-20f) * scale;
}
