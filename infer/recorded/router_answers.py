"""What the host answers the routers on a GPU: addresses of experts, looked up in compiled code."""

import numpy as np

from infer.daemon.client import SlotClient
from infer.daemon.mapping import Mapping
from infer.recorded.compiled_lookup import LOOKUP, NO_ANSWER, REVOKED, answer_router
from infer.recorded.decode_memory import Mailboxes
from shared.errors import ClientRevoked

# Looks at a mailbox before the GPU is asked whether it still works: some milliseconds.
SPINS = 1_000_000


class RouterAnswers:
    """One record for each router; `layers` are their numbers in the daemon's table."""

    def __init__(self, client: SlotClient, mailboxes: Mailboxes, layers: list[int]) -> None:
        self._client = client
        self._mailboxes = mailboxes
        self._layers = layers
        self._records = np.zeros(len(layers), LOOKUP)
        self._at = [
            self._records.ctypes.data + LOOKUP.itemsize * index for index in range(len(layers))
        ]
        self._mapping: Mapping | None = None
        self._tracing = False

    def begin_step(self, step: int) -> None:
        """The mailboxes will have this number when their ids are those of the step."""
        if self._mapping is not self._client.mapping:
            self._note_mapping(self._client.mapping)
        self._records["step"] = step

    def answer(self, index: int) -> int | None:
        """Wait for a router's ids, end the section before and begin its own.

        -> how many experts are missing; the addresses of the others are in the mailboxes. None if
        the ids have not come yet. ClientRevoked where the section before has read what may have
        been overwritten; it is not ended then.
        """
        found = answer_router(self._at[index])
        if found == NO_ANSWER:
            return None
        if found == REVOKED:
            raise ClientRevoked("the daemon serves this client no more", "attach again")
        if self._tracing:
            ids = self._mailboxes.mail[index].numpy().view(np.int32)[2:]
            top_k = self._client.experts.top_k
            self._client.record(self._layers[index], ids[:top_k], 1)
        return int(found)

    def _note_mapping(self, mapping: Mapping) -> None:
        client, records = self._client, self._records
        table, area = mapping.table, mapping.area
        # A GPU's slots are packed: every part begins with its stretch.
        assert not mapping.part_deltas.any()
        self._stretches = np.ascontiguousarray(client.stretches)
        records["spins"] = SPINS
        records["top_k"] = client.experts.top_k
        records["revoked"] = table.revoked.ctypes.data + 4 * mapping.attached.client
        records["epoch"] = table.epoch_address
        records["words"] = area.words_address
        records["counters"] = area.counters_address
        records["stretches"] = self._stretches.ctypes.data
        for index, layer in enumerate(self._layers):
            record = records[index]
            record["mail"] = self._mailboxes.mail[index].data_ptr()
            record["addresses"] = self._mailboxes.addresses[index].data_ptr()
            record["row"] = client.rows[layer].ctypes.data
            record["uses"] = area.uses[layer].ctypes.data
        self._mapping = mapping
        self._tracing = table.tracing
