"""The file protocol between sidecar and engines, and nothing else: shared memory, semaphores, kernel locks, JSON.

Both sides speak it through this package. It needs the standard library only (`posix_ipc` and `orjson` are used when
present) and imports nothing else of ours, so that it can stand alone in an engine's image. `docs/protocol.md` is its
specification.
"""
