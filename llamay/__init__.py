"""Language models for people who think in branches: contexts fork, match and resume exactly.

    from llamay import Engine, SamplingParams

    engine = Engine.load("smollm2:135m")
    base = engine.prefill("You are reviewing a database migration.")
    branches = base.fork(8)                     # no page is copied
    for event in engine.generate(branches, SamplingParams(temperature=0.8)):
        ...
    base.save("base.llamayctx")
    again = engine.restore("base.llamayctx")    # continues with the same bits

Names are imported when they are asked for, so that `import llamay` takes no time.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llamay.engine import Branch, Counters, Engine, Generation, Request
    from llamay.errors import LlamayError
    from llamay.events import Failed, Finished, PrefillProgress, TextDelta
    from llamay.sampling import SamplingParams
    from llamay.session import Session

_MODULES = {
    "llamay.engine": ("Branch", "Counters", "Engine", "Generation", "Request"),
    "llamay.errors": ("LlamayError",),
    "llamay.events": ("Failed", "Finished", "PrefillProgress", "TextDelta"),
    "llamay.sampling": ("SamplingParams",),
    "llamay.session": ("Session",),
}
_NAMES = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "Branch",
    "Counters",
    "Engine",
    "Failed",
    "Finished",
    "Generation",
    "LlamayError",
    "PrefillProgress",
    "Request",
    "SamplingParams",
    "Session",
    "TextDelta",
]


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module 'llamay' has no attribute {name!r}")
    return getattr(importlib.import_module(_NAMES[name]), name)
