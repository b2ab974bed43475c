"""Colours of code, by Pygments; imported when there is code to colour."""

from collections.abc import Mapping

from rich.style import Style
from rich.text import Text


def highlight(source: str, language: str, styles: Mapping[str, Style]) -> Text:
    """The code with styles `keyword`, `string`, `comment`, `number` and `name` where they apply.

    A language that is not known is left plain.
    """
    text = Text(source, tab_size=4)
    if not language:
        return text
    from pygments.lexers import get_lexer_by_name  # type: ignore[import-untyped]
    from pygments.token import Token  # type: ignore[import-untyped]
    from pygments.util import ClassNotFound  # type: ignore[import-untyped]

    try:
        lexer = get_lexer_by_name(language)
    except ClassNotFound:
        return text
    kinds = (
        (Token.Comment, "comment"),
        (Token.Keyword, "keyword"),
        (Token.Operator.Word, "keyword"),
        (Token.Literal.String, "string"),
        (Token.Literal.Number, "number"),
        (Token.Name.Function, "name"),
        (Token.Name.Class, "name"),
    )
    for start, kind, value in lexer.get_tokens_unprocessed(source):
        for parent, name in kinds:
            if kind in parent:
                text.stylize(styles[name], start, start + len(value))
                break
    return text
