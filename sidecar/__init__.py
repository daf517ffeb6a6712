"""The sidecar: loads weights once, keeps them in shared memory, and tells engines where. Needs no torch."""
