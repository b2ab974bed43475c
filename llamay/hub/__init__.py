"""Model names -> files: where models lie on this machine, pulling them, and their digests.

`find_model` looks and changes nothing, `resolve` pulls what is missing, `pull` always makes sure
that llamay's default model is sound. `llamay.hub.listing` reads headers and is imported apart,
because it needs the file reader.
"""

from llamay.hub.digest import weights_digest
from llamay.hub.models import DEFAULT_MODEL, Pulled, find_model, pull, resolve
from llamay.hub.progress import Progress

__all__ = [
    "DEFAULT_MODEL",
    "Progress",
    "Pulled",
    "find_model",
    "pull",
    "resolve",
    "weights_digest",
]
