"""How much a prompt counts among the uses that eviction goes by.

What decides whom to evict is how often routers chose an expert (shared/policy.py), and a prompt's
routers choose more in a second than decoding does in minutes: counted in full it would wipe out
what decoding has made hot, and what its first layers use would have aged before the last ones are
reached. So a prompt weighs as much as SCAN_ROUNDS of decoding, however long it is, and one that is
no longer than that is counted in full:

    weight = min(1, SCAN_ROUNDS * n_experts / (tokens * top_k))

Ageing halves heat in HALF_LIFE_ROUNDS, as many: a prompt's experts have half of all heat when it is
done, and what was hot before keeps the other half. That is the share it can put out of the slots.
"""

# Of a round, as many lookups as there are experts. By replays and real runs (docs/measurements.md,
# Prompts and the hot set): with less, what follows a prompt finds too little of its experts, with
# more, decoding that goes on beside it too little of its own.
SCAN_ROUNDS = 1.5
# Weights are whole numbers of such parts of a use: longer prompts than 128 k tokens weigh more.
USE_PARTS = 4096


def use_parts(
    token_count: int, top_k: int, n_experts: int, scan_rounds: float = SCAN_ROUNDS
) -> int:
    """What each choice counts where `token_count` tokens are computed in one go, in USE_PARTS."""
    most_tokens = scan_rounds * n_experts / top_k
    if token_count <= most_tokens:
        return USE_PARTS
    return max(1, round(USE_PARTS * most_tokens / token_count))


def is_scan(token_count: int, top_k: int, n_experts: int) -> bool:
    """Whether so many tokens in one go choose as often as there are experts, and so most of them:
    then a layer's experts are needed once it is reached, and not again before the next chunk."""
    return token_count * top_k >= n_experts
