"""`python3 -m sidecar.anchor`: a process that does nothing, for the container that owns the IPC and PID namespaces of others.

The sidecar and the engine come and go; what they share has to stay. So it belongs to a third, which never restarts: this one.
As process 1 of the PID namespace it also has to bury whoever loses his parent, and it has to obey SIGTERM, which process 1
ignores by default. Kubernetes has its pause container for this; docker and podman compose have none.
"""

from __future__ import annotations

import signal


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # then the kernel buries children by itself: sigaction(2)
    signals = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    signal.sigwait(signals)


if __name__ == "__main__":
    main()
