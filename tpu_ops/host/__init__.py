"""The launcher, installed on every worker: standard library and `tpu_ops/protocol/` only, for Python 3.8 and later."""

from tpu_ops.protocol import TYPE_CHECKING as TYPE_CHECKING
