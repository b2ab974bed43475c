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
