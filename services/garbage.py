"""What the garbage collector need not look at."""

from __future__ import annotations

import gc


def keep_loaded_objects() -> None:
    """To be called once everything is loaded: what is there now is there to stay.

    Libraries leave so many objects behind that a collection which looks at all of them takes longer than a step, and
    comes in the middle of one.
    """
    gc.collect()
    gc.freeze()
