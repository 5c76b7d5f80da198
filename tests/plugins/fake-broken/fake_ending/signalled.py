"""Gets the signal of Ctrl-C while it is imported, and makes an ImportError of it, as native extensions do."""

import signal

try:
    signal.raise_signal(signal.SIGINT)
except KeyboardInterrupt as error:
    raise ImportError("interrupted") from error
