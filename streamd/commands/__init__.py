"""Commands that need no running daemon: the disk, the machine, the service."""
