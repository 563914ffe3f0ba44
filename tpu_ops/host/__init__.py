"""The launcher, installed on every worker. It uses only the standard library and `tpu_ops/protocol/`; Python 3.8."""

from tpu_ops.protocol import TYPE_CHECKING as TYPE_CHECKING
