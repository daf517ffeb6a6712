"""What can go wrong in the handoff. Every message is one sentence that ends in a remedy; callers print it as it is."""

from __future__ import annotations


class HandoffError(Exception):
    """Base of all errors of the file protocol."""


class NameRefused(HandoffError):
    """A pool's or a model's name holds something it may not hold."""


class NotFound(HandoffError):
    """The pool, the model or the generation is not there."""


class NotReady(HandoffError):
    """It is there, but was not ready in the time given."""


class Damaged(HandoffError):
    """Bytes in shared memory are not what the protocol writes: torn, corrupt, hostile or of another version."""


class Foreign(HandoffError):
    """An object belongs to another user, or others may write to it; it is not trusted."""


# What says that something is not as it was published. Any other error, a lack of descriptors or of address space say, says that
# nobody has looked.
NOT_AS_PUBLISHED = (Damaged, NotFound, Foreign)


class Busy(HandoffError):
    """Another process holds what was asked for and did not give it back in time."""


class NoRoom(HandoffError):
    """Shared memory, or the memory limit around it, has no room for what is to be stored."""


class Mismatch(HandoffError):
    """The weights in the pool are not the weights that were asked for."""


class DeviceError(HandoffError):
    """A GPU, or its driver, refused what was asked of it. `code` is the driver's, 0 where it was not asked."""

    def __init__(self, message: str, code: int = 0) -> None:
        super().__init__(message)
        self.code = code
