"""The state engine: contexts as values that fork without copying.

It knows a `KVLayout` and the kernel set that lays out a page, and nothing of models.
"""

from llamay.kv.cache import Cache
from llamay.kv.context import Context

__all__ = ["Cache", "Context"]
