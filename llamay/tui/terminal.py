"""What can be asked of the terminal before the app has it."""

import os
import re
import select
import sys
import termios
import time
import tty

_ASK = b"\x1b]11;?\x1b\\\x1b[c"  # the background's colour; then what every terminal answers
_COLOUR = re.compile(rb"rgba?:([0-9a-fA-F]{2,4})/([0-9a-fA-F]{2,4})/([0-9a-fA-F]{2,4})")
_DONE = re.compile(rb"\x1b\[\?[\d;]*c")
_WAIT_S = 0.2


def is_dark() -> bool:
    """Whether the terminal's background is dark; True if it does not say."""
    if (given := os.environ.get("COLORFGBG", "").rpartition(";")[2]).isdigit():
        return int(given) in (0, 1, 2, 3, 4, 5, 6, 8)
    colour = _COLOUR.search(_answer(sys.stdin.fileno(), sys.stdout.fileno()))
    if colour is None:
        return True
    red, green, blue = (int(part, 16) / (16 ** len(part) - 1) for part in colour.groups())
    return bool(0.299 * red + 0.587 * green + 0.114 * blue < 0.5)


def _answer(source: int, target: int) -> bytes:
    """What the terminal answers to `_ASK`, as far as it does so in time."""
    try:
        before = termios.tcgetattr(source)
    except termios.error:
        return b""
    answer, deadline = b"", time.monotonic() + _WAIT_S
    try:
        tty.setcbreak(source, termios.TCSANOW)
        if select.select([source], [], [], 0)[0]:
            return b""  # the user types already, and what is typed is not to be lost
        os.write(target, _ASK)
        while not _DONE.search(answer) and (left := deadline - time.monotonic()) > 0:
            if select.select([source], [], [], left)[0]:
                answer += os.read(source, 1024)
    except OSError:
        return answer
    finally:
        termios.tcsetattr(source, termios.TCSANOW, before)
    return answer
