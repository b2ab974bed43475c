"""Two calm themes: dark and light."""

from textual.theme import Theme

DARK, LIGHT = "llamay-dark", "llamay-light"

THEMES = (
    Theme(
        name=DARK,
        primary="#7aa2f7",
        secondary="#9aa5ce",
        accent="#e0af68",
        success="#9ece6a",
        warning="#ff9e64",
        error="#f7768e",
        foreground="#c8d0e0",
        background="#14161b",
        surface="#1b1e25",
        panel="#22262f",
        dark=True,
    ),
    Theme(
        name=LIGHT,
        primary="#2f5fb3",
        secondary="#54627a",
        accent="#8f5902",
        success="#3d7a1f",
        warning="#a8500b",
        error="#b3263f",
        foreground="#24292f",
        background="#fafafa",
        surface="#f2f2f2",
        panel="#e6e8eb",
        dark=False,
    ),
)
