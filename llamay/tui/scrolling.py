"""Views of many lines whose number changes often."""

from rich.style import Style
from textual.geometry import Size
from textual.scroll_view import ScrollView
from textual.widget import Widget


def component_style(widget: Widget, name: str) -> Style:
    """What a component class sets: colours as they look on the widget, and attributes."""
    own = widget.get_component_rich_style(name, partial=True)
    blended = widget.get_component_rich_style(name)
    return own + Style(
        color=blended.color if own.color else None,
        bgcolor=blended.bgcolor if own.bgcolor else None,
    )


def set_lines(view: ScrollView, lines: int) -> None:
    """Says how many lines a view has.

    The screen is laid out again only if a scroll bar comes or goes; a layout costs more than all
    that is drawn of an update.
    """
    region = view.scrollable_content_region
    size = Size(region.width, lines)
    if size == view.virtual_size:
        return
    scrolled, scrolls = view.virtual_size.height > region.height, lines > region.height
    if scrolled != scrolls or size.width != view.virtual_size.width:
        view.virtual_size = size
        return
    view.set_reactive(Widget.virtual_size, size)
    if scrolls:
        view.vertical_scrollbar.window_virtual_size = lines
