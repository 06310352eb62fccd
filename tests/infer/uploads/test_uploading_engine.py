"""Whole models over slots of one's own: the bits of a client of the daemon's slots."""

import ctypes
import mmap
from dataclasses import replace

import numpy as np
import pytest
from fake_copies import CopiesAtOnce
from fake_upload_device import FakeUploadDevice
from uploading_bench import NAME, connect, daemon, least_cache

import infer.engine
from infer.commands.prompt_reads import PromptWatch
from infer.config import ModelConfig
from infer.daemon.recovery import Recovery
from infer.engine import Engine
from infer.resident.resident_weights import open_streamed
from infer.uploads.slot_cache_integrity import check_integrity
from shared.gguf_index import GgufIndex

PROMPT, DECODED = [20 + 7 * n % 300 for n in range(40)], list(range(40, 52))


@pytest.fixture(params=["demo", "glm-mtp-udmix"])
def model(request):
    if request.param == "demo":
        return request.getfixturevalue("demo_model")
    return request.getfixturevalue("shared_dir") / "oracle" / f"{request.param}.gguf"


def rows_of(engine):
    """Logits of a prompt in two chunks, and of tokens one at a time."""
    rows = [engine.logits(PROMPT[:25]), engine.logits(PROMPT[25:])]
    rows += [engine.extend([token])[np.newaxis] for token in DECODED]
    return np.concatenate(rows)


def open_engine(model, recovery=None, **options):
    config = ModelConfig(model=model, device="cpu", ctx=256, threads=2, **options)
    return Engine(GgufIndex.open(model), NAME, config, recovery=recovery)


class Lane(CopiesAtOnce):
    """Copies for streamed layers, made at once."""

    def __init__(self, _device, buffer_bytes, host, _keepalive):
        super().__init__(buffer_bytes)
        self.pinned_count = len(host)


@pytest.mark.parametrize("align", [mmap.PAGESIZE, 512])
def test_layers_that_do_not_fit_are_copied_from_the_daemons_memory(place, model, align):
    index = GgufIndex.open(model)
    file = np.memmap(model, np.uint8, mode="r")
    with daemon(model):
        client = connect(model, FakeUploadDevice(), gpu_resident=0)
        mapping = client.mapping
        found = mapping.attached.host_align
        assert found % mmap.PAGESIZE == 0
        shared_pages = replace(mapping.attached, host_align=align)
        lanes = []

        def make_lane(*arguments):
            lanes.append(Lane(*arguments))
            return lanes[0]

        streamed = open_streamed(index, replace(mapping, attached=shared_pages), None, make_lane)
        assert (lanes[0].pinned_count > 0) == (align == mmap.PAGESIZE)
        for layer, layout in streamed.layouts.items() if align == found else ():
            streamed.enter(layer)
            for placed in layout.tensors:
                tensor, start = placed.tensor, streamed.addresses[layer] + placed.payload_offset
                wanted = file[tensor.offset : tensor.offset + tensor.byte_count].tobytes()
                assert ctypes.string_at(start, tensor.byte_count) == wanted
            streamed.leave(layer)
        client.close()


@pytest.mark.parametrize("exact", [False, True])
def test_own_slots_change_no_bit(place, model, exact, monkeypatch):
    with daemon(model):
        engine = open_engine(model, exact=exact)
        expected = rows_of(engine)
        recorded = engine.graphs is not None
        engine.close()
        # Copies are made as late as may be; the CPU's kernels do not wait.
        device = FakeUploadDevice(late_copies=True)
        client = connect(model, device, least_cache(model))
        with monkeypatch.context() as patch:
            patch.setattr(infer.engine, "attach", lambda *_: client)
            engine = open_engine(model, exact=exact)
        assert engine.client.mapping.resident_address != client._host.mapping.resident_address
        assert np.array_equal(rows_of(engine), expected)
        assert (engine.graphs is not None) == recorded
        check_integrity(client.cache)
        assert client.cache.eviction_count > 0
        (values,) = client.stats()["clients"]
        assert values["tokens"] == len(PROMPT) + len(DECODED)
        assert (values["own_hits"], values["own_misses"]) == client.lookups
        assert values["hits"] + values["misses"] == values["own_misses"]
        engine.close()


def test_a_prompt_s_uploads_are_those_to_own_slots(place, demo_model, monkeypatch):
    """The daemon knows nothing of them."""
    with daemon(demo_model):
        client = connect(demo_model, FakeUploadDevice(), least_cache(demo_model))
        monkeypatch.setattr(infer.engine, "attach", lambda *_: client)
        engine = open_engine(demo_model)
        watch = PromptWatch(engine)
        engine.extend(PROMPT)
        reads = watch.reads(len(PROMPT))
        engine.close()
    assert reads.uploads == reads.absent > 0
    assert reads.uploaded_bytes == client.uploaded_bytes > reads.uploads


def test_a_conversation_goes_on_with_the_next_daemon(place, demo_model, monkeypatch):
    recovery = Recovery(NAME, demo_model, 5, tell=lambda _text: None)
    with daemon(demo_model):
        engine = open_engine(demo_model)
        expected = rows_of(engine)
        engine.close()
        client = connect(demo_model, FakeUploadDevice(late_copies=True), least_cache(demo_model))
        monkeypatch.setattr(infer.engine, "attach", lambda *_: client)
        engine = open_engine(demo_model, recovery)
        found = [engine.logits(PROMPT[:25])]
    hits = client.lookups[0]
    with daemon(demo_model):
        found += [engine.logits(PROMPT[25:])]
        found += [engine.extend([token])[np.newaxis] for token in DECODED]
        assert np.array_equal(np.concatenate(found), expected)
        assert client.lookups[0] > hits
        check_integrity(client.cache)
        engine.close()
