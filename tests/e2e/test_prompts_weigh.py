"""A long prompt's choices count in parts for eviction, a short one's and decoding's in full."""

import contextlib

import numpy as np
import pytest

from infer.commands.measure import BENCH_TEXT
from infer.config import ModelConfig
from infer.session import Session
from shared.scan import SCAN_ROUNDS, USE_PARTS, use_parts


@pytest.mark.parametrize("chunk", [None, 32])
def test_choices_are_counted_by_the_length_of_the_whole_prompt(chunk, module_place, demo_model):
    daemon = module_place.daemon(demo_model, "--name", f"weigh-{chunk}")
    config = ModelConfig(model=demo_model, name=daemon.name, chunk=chunk)
    with Session(config) as session:
        engine, experts = session.engine, session.engine.client.experts
        area, moe_layers = engine.client.mapping.area, experts.layer_class >= 0
        ids = session.tokenizer.encode(BENCH_TEXT * 2)[:100]
        engine.logits(ids)  # of all tokens in every layer
        parts = use_parts(len(ids), experts.top_k, experts.n_experts)
        assert parts < USE_PARTS
        scanned = area.scanned.sum(axis=1)
        np.testing.assert_array_equal(
            scanned, np.where(moe_layers, parts * len(ids) * experts.top_k, 0)
        )
        assert not area.uses.any()
        short = int(SCAN_ROUNDS * experts.n_experts / experts.top_k)
        engine.extend(ids[:1])
        engine.logits(ids[:short])
        np.testing.assert_array_equal(
            area.uses.sum(axis=1), np.where(moe_layers, (1 + short) * experts.top_k, 0)
        )
        np.testing.assert_array_equal(area.scanned.sum(axis=1), scanned)
    daemon.stop()


class Cancelled(Exception):
    pass


@pytest.mark.parametrize("ends", ["well", "broken off"])
def test_the_daemon_sees_where_a_prompt_is_while_it_goes_on(ends, module_place, demo_model):
    daemon = module_place.daemon(demo_model, "--name", f"scan-{ends[0]}")
    with Session(ModelConfig(model=demo_model, name=daemon.name)) as session:
        engine, seen = session.engine, []
        area = engine.client.mapping.area
        moe_layers = (engine.client.experts.layer_class >= 0).nonzero()[0].tolist()
        ids = session.tokenizer.encode(BENCH_TEXT)[:40]

        def tap(name, _values):
            if name.startswith("attn_out"):
                seen.append(area.scan_layer)
                if ends == "broken off" and area.scan_layer == moe_layers[2]:
                    raise Cancelled

        with contextlib.suppress(Cancelled):
            engine.extend(ids, tap=tap)
        passed = [layer for layer in dict.fromkeys(seen) if layer is not None]
        assert passed == (moe_layers[:-1] if ends == "well" else moe_layers[:3])
        assert area.scan_layer is None
        seen.clear()
        engine.extend(ids[:2], tap=tap)
        assert not any(seen), "too few tokens"
    daemon.stop()
