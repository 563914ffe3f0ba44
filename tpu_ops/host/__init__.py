"""The program that every worker carries. Standard library only, Python 3.8, imports nothing else of tpu_ops."""

#: As of typing, whose import takes each request some milliseconds of the worker.
TYPE_CHECKING = False
