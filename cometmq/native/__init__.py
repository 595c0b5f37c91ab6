"""The optional C extension: the hot loops over bytes, byte-identical to the plain Python that stays
beside each of its callers.

``accelerator`` is the module, or None: it is built where a C compiler is at hand when the package
is installed, and ``COMETMQ_NATIVE=0`` in the environment turns it off.
"""

from __future__ import annotations

import importlib
import inspect
import os
import zlib
from typing import Any, TypeVar, cast

from cometmq.native.interface import Accelerator, Buffer

T = TypeVar("T")

SWITCH = "COMETMQ_NATIVE"


def _load() -> Accelerator | None:
    if os.environ.get(SWITCH) == "0":
        return None
    try:
        return cast(Accelerator, importlib.import_module("cometmq.native._accelerator"))
    except ImportError:
        return None


accelerator = _load()


def untracked(plain: type[T]) -> type[T]:
    """The extension's type of this name where it was built, with everything of the plain class that
    it does not have itself. It is no base class: the garbage collector tracks objects of every
    class made in Python.
    """
    if accelerator is None:
        return plain
    kind: Any = getattr(accelerator, plain.__name__)
    left_out = {"__init__", "__module__", "__slots__", *vars(plain)["__slots__"]}
    for name, member in vars(plain).items():
        if name not in left_out and vars(kind).get(name) is None:
            setattr(kind, name, member)
    kind.__signature__ = inspect.signature(plain)
    return cast("type[T]", kind)


def crc32(data: Buffer) -> int:
    """``zlib.crc32``, several times faster where it can be: for whole batches and chunks."""
    return zlib.crc32(data) if accelerator is None else accelerator.crc32(data)


def description() -> str:
    """What runs in this process, for logs and metrics: ``plain``, or ``native`` and how it computes
    CRCs.
    """
    return "plain" if accelerator is None else f"native, CRC-32 by {accelerator.CRC32}"
