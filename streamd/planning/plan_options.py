"""The machine that `streamd plan` plans for, where it is not this one."""

import argparse
from dataclasses import dataclass

from shared.io_choice import Rate, parse_rate
from shared.options import build, given, option, parse_auto_size


@dataclass(frozen=True)
class MachineOptions:
    """A described machine's RAM and rates; its GPU is --vram. None: this machine's, if known."""

    ram: int | None = option(
        None,
        "the RAM of the machine to plan for, of which 2.15 GB are left to the system (default: what"
        " is free on this one)",
        parse=parse_auto_size,
        metavar="SIZE",
    )
    disk: Rate | None = option(
        None,
        "how fast its disk reads expert slabs, such as 5GB/s (default: as bench-io has measured)",
        parse=parse_rate,
        metavar="RATE",
    )
    pcie: Rate | None = option(
        None, "how fast it copies to its GPU, such as 13GB/s", parse=parse_rate, metavar="RATE"
    )
    bandwidth: Rate | None = option(
        None,
        "of the memory that weights are computed from (a GPU's where there is one), such as"
        " 288GB/s",
        parse=parse_rate,
        metavar="RATE",
    )


def read_machine(arguments: argparse.Namespace) -> MachineOptions:
    return build(MachineOptions, [("command line", given(arguments, MachineOptions))])
