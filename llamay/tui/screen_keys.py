"""The keys of the screens above the main one, as tables that bindings, help and palette read."""

from llamay.tui.keys import Key

COMPARE = (
    Key("compare_leave_prompt", "escape", "leave_prompt", "Branches", "From the prompt to a pane"),
    Key("compare_stop", "escape", "stop", "Stop", "Stop all answers here; what came stays"),
    Key("compare_back", "escape", "back", "Back", "Back to the tree"),
    Key("compare_prompt", "enter", "prompt", "Ask all", "Write one prompt to all branches"),
    Key("compare_pane_1", "1", "pane(0)", "Focus", "To the first branch"),
    Key("compare_pane_2", "2", "pane(1)", "", "To the second branch"),
    Key("compare_pane_3", "3", "pane(2)", "", "To the third branch"),
    Key("compare_pane_4", "4", "pane(3)", "", "To the fourth branch"),
    Key("compare_promote", "p", "promote", "Promote", "Go on with this branch alone"),
    Key("compare_drop", "d", "drop", "Drop", "Delete this branch's last turn"),
    Key("compare_undo", "u", "undo", "Undo", "Bring back what was dropped"),
    Key("compare_together", "t", "together", "Together", "Scroll all together, or each alone"),
    Key("compare_copy", "y", "copy", "", "Copy this branch's last turn"),
)

CONFIRM = (
    Key("confirm_yes", "y", "yes", "Yes", "Do it"),
    Key("confirm_no", "n,escape", "no", "No", "Leave things as they are"),
)

PAGE_MAP = (
    Key("page_left", "left,h", "move('left')", "Page", "The page before"),
    Key("page_right", "right,l", "move('right')", "", "The page after"),
    Key("page_up", "up,k", "move('up')", "", "The page above"),
    Key(
        "page_down", "down,j", "move('down')", "", "The page below; from the last row to the tokens"
    ),
    Key("page_first", "home", "move('home')", "", "The first page"),
    Key("page_last", "end", "move('end')", "", "The last page"),
)

TOKENS = (
    Key("token_left", "left,h", "move('left')", "Token", "The token before"),
    Key("token_right", "right,l", "move('right')", "", "The token after"),
    Key("token_pages", "up,k", "pages", "Pages", "Up to the page map"),
    Key("token_first", "home", "move('home')", "", "The first token"),
    Key("token_last", "end", "move('end')", "", "The last token, and those that come"),
)

PICK_LIST = (
    Key("list_choose", "enter", "select", "Choose", "Choose this one"),
    Key("list_up", "up,k", "cursor_up", "", "The one above"),
    Key("list_down", "down,j", "cursor_down", "", "The one below"),
)

SESSIONS = (
    Key("session_new", "n", "new", "New", "A new session"),
    Key("session_rename", "r", "rename", "Rename", "Give this session another name"),
    Key("session_delete", "d,delete", "delete", "Delete", "Delete this session for good"),
    Key("session_filter", "slash", "filter", "Filter", "Show those with some words only"),
    Key("session_to_list", "down", "to_list", "", "From the filter to the list"),
    Key("session_leave", "escape", "leave", "Back", "Leave the filter; else back"),
)

MODELS = (
    Key("model_name", "slash", "name", "Other", "A model by name, or the path of its file"),
    Key("model_to_list", "up", "to_list", "", "From the name to the list"),
    Key("model_leave", "escape", "leave", "Back", "Stop pulling; leave the name; else back"),
)

SETTINGS = (
    Key("settings_save", "ctrl+s", "save", "Save", "Let these settings hold from here on"),
    Key("settings_up", "up", "field(-1)", "", "The field above"),
    Key("settings_down", "down", "field(1)", "", "The field below"),
    Key("settings_leave", "escape", "leave", "Back", "Back without a change"),
)

SCREENS = {
    "Compare": COMPARE,
    "Page map": PAGE_MAP,
    "Tokens": TOKENS,
    "Lists": PICK_LIST,
    "Sessions": SESSIONS,
    "Models": MODELS,
    "Settings": SETTINGS,
}
