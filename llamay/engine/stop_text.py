"""Stop texts: where an answer ends because of what it says."""

from collections.abc import Sequence


class StopText:
    """Watches an answer's text for stop texts; holds back what could be the start of one.

    The first to be complete ends the answer; of those complete at once, the longest. So it does not
    matter how the text is cut.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.found = False

    def feed(self, text: str) -> str:
        """The text that is surely part of the answer; after a stop text, nothing more."""
        if self.found:
            return ""
        text = self._held + text
        found = [(at + len(s), at) for s in self._stops if (at := text.find(s)) >= 0]
        if found:
            self.found, self._held = True, ""
            _, start = min(found)
            return text[:start]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What was held back, at the end of the answer."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` starts with."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if stop.startswith(text[-n:])), 0)
