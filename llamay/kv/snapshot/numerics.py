"""Numerics ids of contexts that left the cache and came back.

An id is that of a kernel set, then "+" and a mark for everything in the context's history that
those kernels would not have computed: a lossy precision, or another kernel set's id. Marks are
sorted and never repeated. Only an id without marks equals a cache's, so what has marks is never
matched by a prompt.
"""

from llamay.formats import KVPrecision

_MARK = "+"


def holds(stored: KVPrecision, own: KVPrecision) -> bool:
    """Whether rows of precision `own` come back to the same bits after being stored as `stored`."""
    if stored is own or stored is KVPrecision.F32:
        return True
    return stored is KVPrecision.VQ8 and own is KVPrecision.Q8


def marked(numerics: str, *marks: str) -> str:
    """`numerics` with these marks too."""
    base, *own = numerics.split(_MARK)
    return _MARK.join([base, *sorted({*own, *marks} - {base})])


def joined(id_: str, other: str) -> str:
    """`id_` with the marks of `other` too, an id of the same kernels."""
    return marked(id_, *other.split(_MARK)[1:])


def restored(
    saved: str, saved_precision: KVPrecision, own: str, own_precision: KVPrecision
) -> tuple[str, bool]:
    """The id of a context saved with id `saved` in a cache of id `own`; whether that continues it.

    The precisions are those of the two caches.
    """
    base, *marks = saved.split(_MARK)
    if base == own and saved_precision is own_precision:
        return saved, True
    if base == own:
        return marked(own, saved_precision.value, *marks), False
    return marked(own, base, *marks), False
