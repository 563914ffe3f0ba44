"""The launcher, installed on every worker: standard library and `tpu_ops/protocol/` alone, Python 3.8."""

from tpu_ops.protocol import TYPE_CHECKING as TYPE_CHECKING
