"""Opens sessions in memory."""

from collections.abc import Callable
from pathlib import Path

from tests.tui.fake_session import FakeSession


class FakeHost:
    def __init__(self, home: Path, session: FakeSession | None = None) -> None:
        self.home = home
        self.key = None
        self.model = "smollm2:135m"
        self.remark = ""
        self.session = session or FakeSession()
        self.fails: Exception | None = None
        self.opened: list[tuple[str | None, str | None]] = []

    @property
    def title(self) -> list[str]:
        return ["SmolLM2 135M", "cpu avx512-vnni", "kv f32"]

    def open(self, name: str | None, model: str | None, told: Callable[[str], None]) -> FakeSession:
        self.opened.append((name, model))
        if self.fails:
            raise self.fails
        if name is not None and name != self.session.name:
            self.session = FakeSession(name)
        return self.session

    def close(self) -> None:
        pass
