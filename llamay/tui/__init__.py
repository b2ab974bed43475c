"""The terminal interface: `run` opens it; `textual` is imported here and nowhere else."""

import sys
from contextlib import suppress

from llamay.tui.app import LlamayApp
from llamay.tui.host import EngineHost, Host
from llamay.tui.terminal import is_dark
from llamay.tui.text import duration, one_line, plural, size
from llamay.tui.themes import DARK, LIGHT, saved_theme

__all__ = ["EngineHost", "run"]


def run(host: Host, session: str | None = None) -> int:
    """Opens the interface on a session, by default the last one, and returns an exit code.

    However it ends, the session is saved, the terminal is as it was, and the command that resumes
    is printed.
    """
    theme = saved_theme(host.home) or (DARK if is_dark() else LIGHT)
    app = LlamayApp(host, session, theme=theme)
    try:
        app.run()
    finally:
        app.close_session()
        host.close()
        # After SIGHUP there may be nobody to read it.
        with suppress(OSError):
            _say_goodbye(app)
    return app.exit_code or app.return_code or 0


def _say_goodbye(app: LlamayApp) -> None:
    goodbye = app.goodbye
    if goodbye is None:
        return
    figures = [
        plural(goodbye.branches, "branch"),
        plural(goodbye.pages, "page"),
        f"{size(goodbye.bytes_written)} new",
        duration(goodbye.seconds),
    ]
    print(f"saved {one_line(app.last_name)}: {', '.join(figures)}")
    if goodbye.problem:
        print(f"but {one_line(goodbye.problem)}")
    print(f"resume with:  {goodbye.command}")
    sys.stdout.flush()
