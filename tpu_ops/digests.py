"""SHA-1 and SHA-256, as of hashlib, for what names things: without OpenSSL, which hashlib loads before anything else.

That takes some 3 % of the CPU of a command on a few workers. The interpreter has its own of both, and the standard
library's random takes them likewise.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hashlib import sha1, sha256
else:
    try:
        from _sha1 import sha1

        if sys.version_info >= (3, 12):
            from _sha2 import sha256
        else:
            from _sha256 import sha256
    except ImportError:  # An interpreter may be built without.
        from hashlib import sha1, sha256

__all__ = ["sha1", "sha256"]
