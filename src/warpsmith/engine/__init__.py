"""A request's life: sampling, the decode loop, conversations and snapshots, stop conditions, stats."""
