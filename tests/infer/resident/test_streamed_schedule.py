"""Copies and readers of streamed layers, in every order that a GPU's streams allow."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infer.resident.streamed_layers import StreamedLayers
from shared.gguf_shard import TensorInfo
from shared.resident import gpu_resident_layout
from shared.streamed import BUFFERS

MODEL_LAYERS = 9
TENSOR_BYTES = 256


class Stream:
    """What is queued, in order: ("wait", place), ("copy", buffer, layer), ("read", buffer, layer).

    A place is a stream and how many of its entries must be done.
    """

    def __init__(self, deaf=False):
        self.queued = []
        self.done_count = 0
        self.deaf = deaf

    def wait_event(self, event):
        """For where the event stands now, as CUDA does: recording it again changes nothing."""
        if event.place is not None and not self.deaf:
            self.queued.append(("wait", event.place))


class Event:
    place = None

    def record(self, stream):
        self.place = stream, len(stream.queued)


class Lane:
    """Two streams; what is copied is told by its source address, the layer's number."""

    buffers = tuple(TENSOR_BYTES * buffer for buffer in range(BUFFERS))

    def __init__(self, copying, computing):
        self.copying, self._computing = copying, computing

    def computing(self):
        return self._computing

    def event(self):
        return Event()

    def copy(self, copy):
        layer = copy.source // TENSOR_BYTES
        self.copying.queued.append(("copy", copy.target // TENSOR_BYTES, layer))


class World:
    """A streamed model whose work is only queued, until `run` does it in some order."""

    def __init__(self, layers, deaf_copies=False, deaf_readers=False):
        self.copying, self.computing = Stream(deaf_copies), Stream(deaf_readers)
        tensors = [TensorInfo(str(n), (8, 8), 0, 0, n, TENSOR_BYTES) for n in range(MODEL_LAYERS)]
        layouts = {layer: gpu_resident_layout([tensors[layer]]) for layer in layers}
        source = gpu_resident_layout(tensors)
        self.streamed = StreamedLayers(layouts, source, 0, Lane(self.copying, self.computing))

    def queue_pass(self, layer_count=MODEL_LAYERS, cut_short=False):
        """cut_short: an error comes between a reader of the last layer and its end."""
        for layer in range(layer_count):
            self.streamed.enter(layer)
            address = self.streamed.addresses.get(layer)
            if address is not None:
                self.computing.queued.append(("read", address // TENSOR_BYTES, layer))
            if not (cut_short and layer == layer_count - 1):
                self.streamed.leave(layer)

    def run(self, choose):
        """What goes wrong: a reader and a copy at one buffer together, or another layer's bytes."""
        faults, held, busy = [], {}, {}
        while ready := [s for s in (self.copying, self.computing) if self._can_go_on(s)]:
            stream = choose(ready)
            kind, *details = stream.queued[stream.done_count]
            if kind == "wait" or stream in busy:
                busy.pop(stream, None)
                stream.done_count += 1
                continue
            buffer, layer = busy[stream] = details
            if kind == "copy":
                held[buffer] = layer
            elif held.get(buffer) != layer:
                faults.append(f"layer {layer} is read where {held.get(buffer)} lies")
            if len(busy) == 2 and len({at for at, _ in busy.values()}) == 1:
                faults.append(f"buffer {buffer} is read and written at once")
        assert all(len(s.queued) == s.done_count for s in (self.copying, self.computing))
        return faults

    @staticmethod
    def _can_go_on(stream):
        if stream.done_count == len(stream.queued):
            return False
        kind, *details = stream.queued[stream.done_count]
        if kind != "wait":
            return True
        other, count = details[0]
        return other.done_count >= count


LAYERS = st.sets(st.integers(0, MODEL_LAYERS - 1), min_size=1).map(sorted)
PASSES = st.lists(st.tuples(st.integers(1, MODEL_LAYERS), st.booleans()), min_size=1, max_size=4)


@given(LAYERS, PASSES, st.randoms(use_true_random=False))
def test_no_reader_ever_sees_a_copy_at_work_or_another_layer(layers, passes, chance):
    world = World(layers)
    for layer_count, cut_short in passes:
        world.queue_pass(layer_count, cut_short)
    assert world.run(chance.choice) == []


@pytest.mark.parametrize("rule", ["deaf_copies", "deaf_readers"])
def test_without_either_rule_it_goes_wrong(rule):
    """So the test above would see it."""
    faults = []
    for seed in range(50):
        world = World([1, 3, 4, 7], **{rule: True})
        world.queue_pass()
        faults += world.run(random.Random(seed).choice)
    assert faults


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
def test_a_layer_is_queued_ahead_and_once_a_pass(count):
    world = World(range(count))
    world.queue_pass()
    for _ in range(2):
        copied_count = len(world.copying.queued)
        for layer in range(MODEL_LAYERS):
            before = list(world.copying.queued)
            world.streamed.enter(layer)
            assert world.copying.queued == before, "it was on its way already"
            world.streamed.leave(layer)
        copies = [q for q in world.copying.queued[copied_count:] if q[0] == "copy"]
        # A buffer that serves one layer alone keeps it.
        shared = [n for n in range(count) if len(range(n % BUFFERS, count, BUFFERS)) > 1]
        assert sorted(layer for _, _, layer in copies) == shared


def test_the_next_copy_waits_for_the_readers_before_it_only():
    """It is queued behind the layer that leaves its buffer, not behind the next one."""
    world = World([0, 1, 2])
    world.queue_pass(1)
    readers_before = len(world.computing.queued)
    world.streamed.enter(1)
    places = [details[0] for kind, *details in world.copying.queued if kind == "wait"]
    assert places[-1] == (world.computing, readers_before)
