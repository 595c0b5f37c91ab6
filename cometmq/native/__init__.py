"""The optional C extension: the hot loops over bytes, byte-identical to the plain Python that stays
beside each of its callers.

``accelerator`` is the module, or None: it is built where a C compiler is at hand when the package
is installed, and ``COMETMQ_NATIVE=0`` in the environment turns it off.
"""

from __future__ import annotations

import importlib
import os
import zlib
from typing import cast

from cometmq.native.interface import Accelerator, Buffer

SWITCH = "COMETMQ_NATIVE"


def _load() -> Accelerator | None:
    if os.environ.get(SWITCH) == "0":
        return None
    try:
        return cast(Accelerator, importlib.import_module("cometmq.native._accelerator"))
    except ImportError:
        return None


accelerator = _load()


def crc32(data: Buffer) -> int:
    """``zlib.crc32``, several times faster where it can be: for whole batches and chunks."""
    return zlib.crc32(data) if accelerator is None else accelerator.crc32(data)


def description() -> str:
    """What runs in this process, for logs and metrics: ``plain``, or ``native`` and how it computes
    CRCs.
    """
    return "plain" if accelerator is None else f"native, CRC-32 by {accelerator.CRC32}"
