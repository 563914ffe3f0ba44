"""tpu_ops: fleets of Cloud TPU VMs, from discovery over configuration to training runs."""

__version__ = "0.1.0"
