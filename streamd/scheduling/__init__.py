"""Who may have slots and bandwidth next: demands, hints, backfill, several clients."""
