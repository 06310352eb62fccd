"""The regions that hits are served from: two views of one memory see the same, at no cost."""

import mmap
import timeit

import numpy as np
import pytest

from shared.errors import ProtocolMismatch
from shared.residency import (
    MAX_CELL,
    MAX_CLIENTS,
    NONE_EPOCH,
    NOT_RESIDENT,
    RING_CELLS,
    ClientArea,
    ResidencyTable,
    TableShape,
)
from shared.scan import USE_PARTS

SHAPE = TableShape(3, 40)
LOOKUP_MICROSECONDS_MAX = 5


@pytest.fixture
def memory():
    return bytearray(SHAPE.table_bytes)


@pytest.fixture
def table(memory):
    table = ResidencyTable(memory, SHAPE)
    table.initialise()
    return table


@pytest.fixture
def area():
    area = ClientArea(bytearray(SHAPE.area_bytes), SHAPE)
    area.initialise()
    return area


def test_how_idle_the_drive_is_is_seen_by_clients(table, memory):
    assert table.drive_us == (0, 0)
    table.drive_us = (3_000_000, 5_000_000_000)
    assert ResidencyTable(memory, SHAPE).drive_us == (3_000_000, 5_000_000_000)
    assert (table.tracing, table.epoch) == (False, 1)


def test_how_far_a_prompt_is(area):
    assert area.scan_layer is None
    for layer in (0, SHAPE.n_layers - 1):
        area.scan_layer = layer
        assert area.scan_layer == layer
    area.scan_layer = None
    assert area.scan_layer is None


@pytest.mark.parametrize("word", [SHAPE.n_layers + 1, 2**63, 2**64 - 1])
def test_a_layer_that_does_not_exist_is_none(area, word):
    """It is the client's word."""
    area._scan[0] = word
    assert area.scan_layer is None


def test_a_new_table_is_empty(table):
    assert table.epoch == 1
    assert (table.host_slots == NOT_RESIDENT).all()
    assert (table.gpu_slots == NOT_RESIDENT).all()
    assert table.host_slots.shape == table.gpu_slots.shape == (3, 40)
    assert table.revoked.shape == (MAX_CLIENTS,)
    assert not table.revoked.any()


def test_a_second_view_sees_what_the_first_writes(table, memory):
    theirs = ResidencyTable(memory, SHAPE)
    theirs.check_header()
    table.epoch += 41
    table.host_slots[2, 39] = 7
    table.gpu_slots[0, 0] = 9
    table.revoked[MAX_CLIENTS - 1] = 1
    assert theirs.epoch == 42
    assert theirs.host_slots[2, 39] == 7
    assert theirs.gpu_slots[0, 0] == 9
    assert theirs.revoked.tolist() == [0] * (MAX_CLIENTS - 1) + [1]
    assert np.count_nonzero(theirs.host_slots != NOT_RESIDENT) == 1, "no field covers another"


def test_a_read_only_mapping_will_do_for_a_client(memory, table):
    table.host_slots[1, 5] = 3
    with mmap.mmap(-1, SHAPE.table_bytes) as region:
        region[:] = bytes(memory)
        theirs = ResidencyTable(memoryview(region).toreadonly(), SHAPE)
        assert theirs.host_slots[1].tolist()[5] == 3
        with pytest.raises(ValueError, match="read-only"):
            theirs.host_slots[1, 5] = 4
        del theirs


@pytest.mark.parametrize("byte_offset", [0, 8, 16, 24])
def test_another_layout_is_refused(table, memory, byte_offset):
    table.check_header()
    memory[byte_offset] ^= 1
    with pytest.raises(ProtocolMismatch, match="another layout") as refusal:
        table.check_header()
    assert "restart the daemon" in refusal.value.remedy


def test_of_another_model(table, memory):
    with pytest.raises(ProtocolMismatch):
        ResidencyTable(memory, TableShape(40, 3)).check_header()


def test_a_new_area_reads_nothing(area):
    assert area.published == NONE_EPOCH
    assert area.section == area.hits == area.misses == area.fetches == area.tokens == 0
    assert area.uses.shape == (3, 40)
    assert not area.uses.any()


def test_sections_are_numbered_and_publish_the_epoch(area, table):
    assert area.enter(table) == area.section == 1
    assert area.published == 1
    table.epoch = 5
    assert area.published == 1, "until the section ends"
    assert area.enter(table) == 2
    assert area.published == 5
    area.leave()
    assert area.published == NONE_EPOCH
    assert area.section == 2


class MovingTable:
    """Its epoch moves on by itself, as often as it is told to."""

    def __init__(self, *epochs):
        self._epochs = list(epochs)
        self.reads = 0

    @property
    def epoch(self):
        self.reads += 1
        return self._epochs.pop(0) if len(self._epochs) > 1 else self._epochs[0]


@pytest.mark.parametrize(
    ("epochs", "reads", "published"),
    [([4], 2, 4), ([4, 5], 3, 5), ([4, 5, 6, 6], 4, 6), ([4, 4, 9], 2, 4)],
)
def test_entering_goes_on_until_the_epoch_has_not_moved(area, epochs, reads, published):
    table = MovingTable(*epochs)
    area.enter(table)
    assert (table.reads, area.published) == (reads, published)


def test_the_section_is_there_before_its_epoch(area, table):
    """Whoever sees the new epoch must not take it for one of the section before."""

    class Watched(MovingTable):
        @property
        def epoch(self):
            seen.append((area.section, area.published))
            return super().epoch

    seen = []
    area.enter(Watched(8))
    assert seen == [(1, NONE_EPOCH), (1, 8)]


def test_counters_do_not_touch_each_other(area, table):
    area.enter(table)
    area.count_lookups(7, 2)
    area.count_lookups(1, 0)
    area.count_fetch()
    area.count_tokens(30)
    area.note_own_lookups(90, 11)
    area.uses[0, 0] += np.uint32(1)
    assert area.own_lookups == (90, 11)
    assert area.recorded == (0, 0)
    assert (area.hits, area.misses, area.fetches, area.tokens) == (8, 2, 1, 30)
    assert (area.published, area.section, int(area.uses.sum())) == (1, 1, 1)


def test_uses_by_long_prompts_are_counted_in_parts_apart_from_the_others(area):
    experts = np.array([3, 0, 39])
    area.count_uses(1, experts, 1, USE_PARTS)
    area.count_uses(1, experts, np.array([5, 1, 300]), 17)
    area.count_uses(1, experts[:1], 2, USE_PARTS)
    assert area.uses[1, experts].tolist() == [3, 1, 1]
    assert area.scanned[1, experts].tolist() == [85, 17, 5100]
    assert int(area.uses.sum()) == 5
    assert int(area.scanned.sum()) == 5202
    assert (area.recorded, area.hits) == ((0, 0), 0)


def test_counts_of_uses_may_wrap(area):
    area.scanned[0, 7] = 2**32 - 1
    area.count_uses(0, np.array([7]), 3, 17)
    assert int(area.scanned[0, 7]) == 50


def test_looking_up_a_layers_experts_is_a_plain_look_into_memory(table):
    experts = np.array([3, 1, 39, 0, 17, 22, 8, 30])
    table.host_slots[1, experts] = np.arange(8)
    row = table.host_slots[1]
    assert row[experts].tolist() == list(range(8))

    def all_resident():
        return (row[experts] >= 0).all()

    # Of many short runs: on a busy machine a long one is always interrupted.
    seconds = min(timeit.repeat(all_resident, repeat=1000, number=20)) / 20
    assert seconds * 1e6 < LOOKUP_MICROSECONDS_MAX


def test_clients_are_told_to_record(table, memory):
    theirs = ResidencyTable(memory, SHAPE)
    assert not theirs.tracing
    table.tracing = True
    assert theirs.tracing
    theirs.check_header()


def test_records_are_read_as_they_were_written(area):
    area.record(2, np.array([7, 39, 0]), 3)
    area.record(1, np.array([5]), 70_000)
    assert area.recorded == (10, 2)
    assert area.recorded_cells(0, 10).tolist() == [2, 3, 3, 7, 39, 0, 1, MAX_CELL, 1, 5]
    assert area.recorded_cells(6, 10).tolist() == [1, MAX_CELL, 1, 5]
    assert not area.uses.any()
    assert (area.published, area.section, area.tokens) == (NONE_EPOCH, 0, 0)


def test_what_the_ring_has_overwritten_is_none(area):
    count = RING_CELLS // 5
    for number in range(count + 1):
        area.record(0, np.array([number % 40, 1]), 2)
    cells, records = area.recorded
    assert (cells, records) == (5 * (count + 1), count + 1)
    assert area.recorded_cells(0, 5) is None
    assert area.recorded_cells(0, cells) is None
    assert area.recorded_cells(cells - 5, cells).tolist() == [0, 2, 2, count % 40, 1]
    assert area.recorded_cells(7, 3) is None


@pytest.mark.parametrize("expert_count", [1, 40])
def test_a_record_that_is_just_being_written_is_not_read_as_an_old_one(area, expert_count):
    """The daemon is nearly a ring behind, the client has written cells that do not count yet."""
    record_cells = 3 + 1
    for number in range(RING_CELLS // record_cells):
        area.record(0, np.array([number % 40]), 1)
    written, _ = area.recorded
    before = area.recorded
    behind = written - RING_CELLS
    area.record(1, np.arange(expert_count), expert_count)
    area._recorded[:] = before
    longest = 3 + 40
    for begin in range(behind, behind + longest, record_cells):
        assert area.recorded_cells(begin, written) is None
    begin = behind + -(-longest // record_cells) * record_cells
    cells = area.recorded_cells(begin, written)
    assert cells.reshape(-1, record_cells)[:, :3].tolist() == [[0, 1, 1]] * (len(cells) // 4)
