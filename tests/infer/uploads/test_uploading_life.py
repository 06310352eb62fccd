"""What may come between: a read fails, a daemon gives up, ends, traces, takes memory back."""

import sys
import time

import numpy as np
import pytest
import torch
from fake_upload_device import FakeUploadDevice
from uploading_bench import Reader, daemon, least_cache

import infer.recorded.router_answers as router_answers
from infer.recorded.router_answers import RouterAnswers
from infer.uploads.slot_cache_integrity import check_integrity
from shared.errors import ReadFailed
from shared.wire import HOST_TIER

PATIENCE_S = 10.0

TRACED = (
    *("uploads/client.py", "uploads/slot_cache.py", "uploads/host_slots.py"),
    *("shared/slots.py", "shared/victims.py"),
)


@pytest.fixture
def device():
    return FakeUploadDevice(late_copies=True)


def first_layer(reader):
    return reader.experts.classes[0].layers[0]


def bring_to_host(model, layer, experts):
    """By another client."""
    other = Reader(model, FakeUploadDevice())
    other.read(layer, experts)
    other.close()


def test_a_failed_read_reaches_the_caller_and_leaves_nothing(place, demo_model, device):
    with daemon(demo_model) as running:
        reader = Reader(demo_model, device)
        layer, tier = first_layer(reader), running.model.tier
        reader.read(layer, [1])
        arrived = tier.arrived

        def one_is_bad(slot, error):
            bad = tier._grants[slot].expert == 3
            return arrived(slot, ReadFailed("bad sector") if bad else error)

        tier.arrived = one_is_bad
        with pytest.raises(ReadFailed, match="bad sector"):
            reader.read(layer, [1, 2, 3])
        check_integrity(reader.client.cache)
        assert not reader.client.absent(layer, np.array([1])).any()
        assert reader.client.absent(layer, np.array([2, 3])).all()
        del tier.arrived
        reader.read(layer, [1, 2, 3])
        assert reader.client.lookups == (2, 5)
        reader.close()


@pytest.mark.parametrize("is_in_host", [True, False])
def test_a_section_that_was_given_up_is_done_again(place, demo_model, device, is_in_host):
    """And what it brought is not kept: host slots may have been overwritten under the copies."""
    with daemon(demo_model) as running:
        reader = Reader(demo_model, device)
        client, layer = reader.client, first_layer(reader)
        reader.read(layer, [0])
        bring_to_host(demo_model, layer, [4, 5] if is_in_host else [4])
        numbers = []

        def give_up_once():
            numbers.append(client.mapping.attached.ticket)
            assert client.absent(layer, np.array([4, 5])).all()
            if len(numbers) == 1:
                running.model.table.revoked[client.mapping.attached.client] = 1

        reader.read(layer, [0, 4, 5], give_up_once)
        assert len(set(numbers)) == 2, "attached again"
        assert not client.absent(layer, np.array([0, 4, 5])).any()
        assert client.lookups == (2, 5)
        reader.close()


class Interrupting:
    """Ctrl-C before the nth line that runs in the modules of uploads and slots."""

    def __init__(self, line_number):
        self.lines_left = line_number

    def __enter__(self):
        sys.settrace(self._call)

    def __exit__(self, *_):
        sys.settrace(None)

    def _call(self, frame, _event, _arg):
        path = frame.f_code.co_filename
        return self._line if path.endswith(TRACED) else None

    def _line(self, _frame, event, _arg):
        if event == "line":
            self.lines_left -= 1
            if self.lines_left == 0:
                raise KeyboardInterrupt
        return self._line


def test_ctrl_c_may_come_at_any_line(place, demo_model):
    """Nothing is torn after it, and what is read next is whole."""
    device = FakeUploadDevice(late_copies=True, late_kernels=True)
    rng = np.random.default_rng(1)
    with daemon(demo_model, host_cache=10 << 20):
        reader = Reader(demo_model, device, least_cache(demo_model))
        layers = reader.experts.classes[0].layers
        interrupted = 0
        for line_number in range(1, 300):
            layer = int(rng.choice(layers))
            experts = rng.permutation(reader.experts.n_experts)[:4]
            try:
                with Interrupting(line_number):
                    reader.client.read(layer, experts, 1, lambda *_: None)
            except KeyboardInterrupt:
                interrupted += 1
            reader.read(layer, experts)
            reader.read(layer, rng.permutation(reader.experts.n_experts)[:4])
        assert interrupted > 150
        assert device.pinned
        reader.close()
        assert device.pinned == {}


def test_memory_is_let_go_of_when_the_copies_are_done(place, demo_model, device):
    """Of a section that has been broken off too."""
    with daemon(demo_model):
        reader = Reader(demo_model, device)
        layer = first_layer(reader)
        reader.read(layer, [1, 2])
        bring_to_host(demo_model, layer, [3])

        def break_off():
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            reader.read(layer, [1, 2, 3], break_off)
        check_integrity(reader.client.cache)
        assert device.pinned
        reader.client.detach()  # the device looks that no copy is under way
        assert device.pinned == {}
        reader.close()


def test_slots_outlive_the_daemon(place, demo_model, device):
    with daemon(demo_model):
        reader = Reader(demo_model, device)
        client, layer = reader.client, first_layer(reader)
        resident = client.mapping.resident_address
        reader.read(layer, [0, 1])
        device.finish()
        client.detach()
        assert not client.attached
        assert device.pinned == {}
    with daemon(demo_model):
        client.attach()
        assert client.mapping.resident_address == resident
        uploaded = client.uploaded_bytes
        reader.read(layer, [0, 1])
        assert client.uploaded_bytes == uploaded
        reader.read(layer, [2])
        assert client.lookups == (2, 3)
        reader.close()


def test_memory_that_may_be_taken_back_is_not_pinned(place, demo_model, device):
    """The GPU would go on reading the pages that were given back."""
    with daemon(demo_model, governor=True):
        reader = Reader(demo_model, device)
        reader.read(first_layer(reader), [0, 1])
        assert device.pin_tries == 0
        assert reader.compared == 2
        reader.close()


def test_what_routers_choose_is_traced_whatever_is_there(place, demo_model, device, tmp_path):
    with daemon(demo_model, trace=tmp_path / "t.trace"):
        reader = Reader(demo_model, device)
        layer = first_layer(reader)
        area = reader.client._host.mapping.area
        for _ in range(2):
            reader.read(layer, [3, 1])
        cells, records = area.recorded
        assert records == 2
        assert area.recorded_cells(0, cells).tolist() == 2 * [layer, 2, 2, 3, 1]
        reader.close()


def test_only_what_the_host_lacks_is_hinted(place, demo_model, device):
    with daemon(demo_model, warm=False) as running:
        reader = Reader(demo_model, device, least_cache(demo_model))
        client, layer = reader.client, first_layer(reader)
        reader.read(layer, [0, 1])
        client.hint(layer, np.array([0, 1]), 1)
        client.hint(layer, np.array([0, 2, 1, 3]), 1)
        deadline_s = time.monotonic() + PATIENCE_S
        # Statistics go another way than hints, and may overtake them.
        while (stats := client.stats())["tiers"][HOST_TIER]["prefetch"]["hinted"] < 2:
            assert time.monotonic() < deadline_s
        assert stats["tiers"][HOST_TIER]["prefetch"]["hinted"] == 2
        assert running.model.gpu is None
        assert client.tier_values(stats) == {"hits": 0, "misses": 2, "evictions": 0}
        slab_bytes = sum(reader.experts.classes[0].part_bytes)
        assert client.uploads(stats) == (2, 2 * slab_bytes)
        reader.close()


class Mail:
    """Mailboxes that are not pinned, of one router."""

    def __init__(self, top_k):
        self.mail = torch.zeros((1, 1 + -(-top_k // 2)), dtype=torch.int64)
        self.addresses = torch.zeros((1, 4, top_k), dtype=torch.int64)

    def route(self, step, ids):
        self.mail.view(torch.int32)[0, 2 : 2 + len(ids)] = torch.tensor(ids, dtype=torch.int32)
        self.mail[0, 0] = step


@pytest.mark.parametrize("asks", [1, 2], ids=["asked once", "asked in two parts"])
def test_recorded_steps_find_what_their_routers_chose(place, demo_model, monkeypatch, asks):
    """As decode_graphs does it: compiled lookups enter sections, only misses are asked for, and
    the next ids are there when the GPU has done all that was launched before."""
    monkeypatch.setattr(router_answers, "SPINS", 100)
    device = FakeUploadDevice(late_kernels=True)
    rng = np.random.default_rng(1)
    with daemon(demo_model, host_cache=10 << 20):
        reader = Reader(demo_model, device, least_cache(demo_model))
        client, experts = reader.client, reader.experts
        layers = [layer for c in experts.classes for layer in c.layers]
        mails = [Mail(experts.top_k) for _ in layers]
        answers = [RouterAnswers(client, mails[at], [layer]) for at, layer in enumerate(layers)]
        for step in range(1, 31):
            for answer, mail, layer in zip(answers, mails, layers, strict=True):
                device.finish()
                ids = rng.permutation(experts.n_experts)[: experts.top_k].astype(np.int32)
                mail.route(step, ids.tolist())
                answer.begin_step(step)
                addresses = mail.addresses[0, :3].numpy()
                missing_count = answer.answer(0)
                if missing_count:
                    parts = [client.ask(layer, part) for part in np.array_split(ids, asks)]
                    assert sum(len(part.missing) for part in parts) == missing_count
                    first = 0
                    for part in parts:
                        target = addresses[:, first : first + len(part.experts)]
                        first += len(part.experts)
                        target[:, part.present] = client.addresses(part, part.present).T
                        while len(part.missing):
                            arrived = client.wait_some(part)
                            target[:, arrived] = client.addresses(part, arrived).T
                reader.kernel(layer, ids, addresses.T.copy())
                check_integrity(client.cache)
        device.finish()
        client.leave()
        check_integrity(client.cache)
        hits, misses = client.lookups
        assert hits + misses == reader.compared == 30 * len(layers) * experts.top_k
        assert hits
        assert client.cache.eviction_count > 0
        reader.close()
